"""The coordinate check of mu-P (Yang et al. 2022, appendix D.1): ``jaxformer mup CONFIG.py``.

Trains the model of a config of train.py at several widths for a few steps on random tokens, and shows how the mean size of
each named activation grows with the width: with mu-P, whose base is ``optim.mup_base`` or the config's own width, and without.
With mu-P no slope is above 0 by much; the logits may begin below. It prints the slopes of the last step on logarithmic axes,
and draws every step.
"""

import dataclasses
import io
import math
import os
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from jaxformer.config import ModelConfig
from jaxformer.config.strict import Strict, check_seed, within
from jaxformer.nn.listening import capture
from jaxformer.parallel import exit_codes
from jaxformer.tokenizers.disk_cache import target, write
from jaxformer.training.objective import loss
from jaxformer.training.optim import OptimConfig, initial_params, optimizer
from jaxformer.training.run import read_config

Sizes = dict[str, list[float]]
"""Of each activation, its mean size before the first update and after each."""


@dataclass(frozen=True)
class Options(Strict):
    """What to train, and at which widths."""

    config: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]
    """A config file of train.py."""
    widths: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    """Widths to compare, as multiples of the config's d_model; heads and d_ff are multiplied too."""
    steps: int = 4
    """Number of updates, all with optim.lr."""
    rows: int = 4
    """Number of sequences in the batch, which is the same in every step."""
    length: int = 32
    """Number of tokens per sequence."""
    seed: int = 0
    """Seed of the tokens and the initial parameters, from 0 to 4294967295 (2^32 − 1)."""
    out: Path = Path("mup.png")
    """File to write the plot to. The suffix decides its format: .png, .pdf or .svg, for example."""

    def __post_init__(self):
        super().__post_init__()
        within(self, 1, math.inf, "steps", "rows", "length")
        check_seed("seed", self.seed)
        if len(set(self.widths)) < 2 or min(self.widths) <= 0:
            raise ValueError(f"widths={self.widths} must be two or more different positive numbers")


def widened(cfg: ModelConfig, factor: float) -> ModelConfig:
    """``cfg`` of ``factor`` times the width: d_model, heads of the same width, d_ff, of experts too; key/value heads as far
    as they come out whole. Raises ValueError where the others do not."""

    def times(name: str, number: int) -> int:
        if number * factor != round(number * factor) or number * factor < 1:
            raise ValueError(f"{name}={number} times {factor:g} is not a whole number; choose other --widths")
        return round(number * factor)

    names = [name for name in ("d_model", "n_heads", "d_ff", "encoder_heads", "encoder_d_ff") if getattr(cfg, name) is not None]
    sizes: dict[str, Any] = {name: times(name, getattr(cfg, name)) for name in names}
    kv_heads = cfg.n_kv_heads * factor
    sizes["n_kv_heads"] = round(kv_heads) if kv_heads == round(kv_heads) else math.gcd(cfg.n_kv_heads, sizes["n_heads"])
    if cfg.experts.n_experts:
        sizes["experts"] = dataclasses.replace(cfg.experts, d_ff=times("experts.d_ff", cfg.experts.d_ff))
    return dataclasses.replace(cfg, head_dim=cfg.head_dim, **sizes)


def random_batch(cfg: ModelConfig, options: Options) -> dict[str, np.ndarray]:
    """A training batch of tokens that are drawn evenly from the vocabulary."""
    draw = np.random.default_rng(options.seed).integers
    ids = draw(0, cfg.vocab_size, (options.rows, options.length + 1), dtype=np.int32)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": np.ones(ids[:, 1:].shape, np.float32)}
    return batch | ({"source": ids[:, 1:]} if cfg.encoder_layers else {})


def measure(cfg: ModelConfig, optim: OptimConfig, batch: dict[str, np.ndarray], steps: int, seed: int = 0) -> Sizes:
    """The mean |x| of each named activation, averaged over layers: before the first update, and after each of ``steps``."""
    transform = optimizer(optim, cfg, steps)

    @jax.jit
    def step(params, state):
        def objective(params):
            (value, _), activations = capture(lambda params: loss(params, batch, cfg))(params)
            return value, {name: jnp.abs(x).astype(jnp.float32).mean() for name, x in activations.items()}

        grads, sizes = jax.grad(objective, has_aux=True)(params)
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state, sizes

    params = initial_params(optim, cfg, jax.random.key(seed))
    state, measured = transform.init(params), defaultdict(list)
    for _ in range(steps + 1):
        params, state, sizes = step(params, state)
        layers = defaultdict(list)
        for name, size in sizes.items():
            layers[re.sub(r"\.\d+(?=\.)", "", name)].append(float(size))
        for name, values in layers.items():
            measured[name].append(float(np.mean(values)))
    return dict(measured)


def slopes(widths: list[int], sizes: list[Sizes]) -> dict[str, float]:
    """Of each activation, d log(size) / d log(width) after the last update: 0 where the size does not depend on the width."""
    return {
        name: float(np.polyfit(np.log(widths), np.log([measured[name][-1] for measured in sizes]), 1)[0])
        for name in sizes[0]
        if all(measured[name][-1] > 0 for measured in sizes)
    }


def draw(path: Path, widths: list[int], with_: list[Sizes], without: list[Sizes]) -> None:
    """A column of panels with mu-P and one without: size against width of each activation, a line per step."""
    from matplotlib.figure import Figure

    names = list(with_[0])
    figure = Figure(figsize=(9, 2.2 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 2, sharex=True, sharey="row", squeeze=False)
    for row, name in zip(panels, names, strict=True):
        for panel, title, sizes in zip(row, ("mu-P", "without"), (with_, without), strict=True):
            for step in range(len(sizes[0][name])):
                panel.loglog(widths, [measured[name][step] for measured in sizes], marker=".", label=f"{step} updates")
            panel.set_title(f"{name}, {title}", fontsize=8)
    panels[0, 0].legend(fontsize=7)
    figure.supxlabel("d_model")
    figure.supylabel("mean |activation|")
    drawing = io.BytesIO()
    figure.savefig(drawing, dpi=110, format=path.suffix[1:])
    write(path, drawing.getvalue())


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    from matplotlib.backend_bases import FigureCanvasBase
    from rich.console import Console
    from rich.table import Table

    options = tyro.cli(Options, args=arguments, prog="jaxformer mup", description=exit_codes.below(__doc__))
    if target(options.out).suffix[1:] not in (formats := FigureCanvasBase.get_supported_filetypes()):
        raise ValueError(f"--out {options.out} must end with the suffix of a plot format: {', '.join(sorted(formats))}")
    config, _ = read_config(Path(os.path.expanduser(options.config)))
    models = [widened(config.model, factor) for factor in sorted(set(options.widths))]
    widths = [cfg.d_model for cfg in models]
    optim = dataclasses.replace(config.optim, schedule="constant", warmup_steps=0)
    base = optim.mup_base or config.model.d_model
    both = [dataclasses.replace(optim, mup_base=mup_base) for mup_base in (base, None)]
    for cfg in models:
        optimizer(both[0], cfg, options.steps)  # refuses before anything is computed
    runs: list[list[Sizes]] = [
        [measure(cfg, optim, random_batch(cfg, options), options.steps, options.seed) for cfg in models] for optim in both
    ]
    draw(target(options.out), widths, *runs)
    table = Table("activation", "slope with mu-P", "without", title=f"mean |x| after {options.steps} updates, against width")
    with_, without = (slopes(widths, run) for run in runs)
    for name in with_:
        table.add_row(name, f"{with_[name]:+.2f}", f"{without[name]:+.2f}")
    Console().print(table)
    print(f"d_model {', '.join(map(str, widths))}; base {base}; plot in {options.out}")
