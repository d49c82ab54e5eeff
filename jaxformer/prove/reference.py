"""Reference losses: the first losses of the shipped configs, as measured on a CPU, and how near a run comes to them.

A reference is found by a key of everything that decides the losses: the config's values, the tokenizer and the text. The
standard library's text differs between versions of Python, so that a config may have several references, or none for this one.
``benchmarks/reference_losses.py`` measures them and writes references.json.
"""

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxformer import data
from jaxformer.config import ModelConfig
from jaxformer.config.strict import to_dict
from jaxformer.parallel.placement import PLACEMENTS
from jaxformer.training import run

FILE = Path(__file__).parent / "references.json"
STEPS = 20
"""Losses in a reference."""
NEAR = 1e-5
"""Largest relative difference of losses that are called the same up to rounding."""
NO_EFFECT = (
    "run_dir",
    *(f"data.{name}" for name in ("path", "validation_path", "target_path", "tokenizer", "validation_rows")),  # their content
    *(f"train.{name}" for name in ("eval_every", "save_every", "save_minutes", "profile", "log_every", "keep_checkpoints")),
    *(f"train.{name}" for name in ("prompt", "sample_tokens", "temperature", "agree_every", "track")),
)
"""Fields that change no training loss, or only through the text and the tokenizer, which have hashes of their own."""


@dataclass(frozen=True)
class Reference:
    """The first losses of one config on one text."""

    config: str
    """Name of the config file."""
    key: str
    text: str
    """What was trained on, for people."""
    jax: str
    """Version of jax."""
    machine: str
    losses: tuple[float, ...]
    """Of the updates 1 to ``STEPS``, in nats."""


@functools.cache
def references() -> tuple[Reference, ...]:
    """All references of the package."""
    return tuple(Reference(**r | {"losses": tuple(r["losses"])}) for r in json.loads(FILE.read_text(encoding="utf-8")))


def key(config: run.Config, corpus: data.Data) -> str:
    """A hash of what decides the losses of a run: fields that differ from their defaults (so that a new field changes no key),
    the tokenizer and the text. config: its model is fitted to the tokenizer."""
    values = _flat(to_dict(config))
    smallest = ModelConfig(vocab_size=1, d_model=2, n_layers=1, n_heads=1)
    defaults = _flat(to_dict(run.Config(model=smallest)))
    values = {name: value for name, value in values.items() if value != defaults.get(name) and name not in NO_EFFECT}
    text = json.dumps([sorted(values.items()), corpus.tokenizer.content_hash, corpus.content_hash])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def measure(config: run.Config, count: int = STEPS) -> tuple[str, list[float]]:
    """The key of a config and its first ``count`` losses, as ``train.py`` computes them without a mesh."""
    corpus = data.load(config.data)
    config = replace(config, model=run.fit_tokenizer(config.model, corpus.tokenizer))
    placement = PLACEMENTS[config.train.parallel](run.make_update(config, run.make_objective(config)))
    state, losses = placement.begin(functools.partial(run.initial_state, config)), []
    for _, batch in zip(range(count), data.iterate(corpus.train), strict=False):
        state, metrics = placement.step(state, placement.put_batch(batch))
        losses.append(placement.get_metrics(metrics)["loss"])
    return key(config, corpus), losses


def watch(config: run.Config, corpus: data.Data, start: int) -> Callable[[int, float], str]:
    """A function to be called with the number and the loss of every update. It gives a line to print once the run can be
    compared with its reference, and otherwise "": always, for a run that is continued or that has no reference."""
    wanted = key(config, corpus) if start == 0 else ""
    known = {reference.jax: reference for reference in references() if reference.key == wanted}
    reference = known.get(jax.__version__) or next(reversed(known.values()), None)
    losses: list[float] = []

    def compare(step: int, loss: float) -> str:
        if reference is None or step != len(losses) + 1 or step > len(reference.losses):
            return ""
        losses.append(loss)
        return verdict(reference, losses) if step == len(reference.losses) else ""

    return compare


def verdict(reference: Reference, losses: list[float]) -> str:
    """How near the first losses of a run are to its reference."""
    count, named = len(losses), f"the reference losses of jax {reference.jax}"
    if jax.__version__ != reference.jax:
        named += f" (this is jax {jax.__version__})"
    apart = [abs(a - b) / abs(b) for a, b in zip(losses, reference.losses, strict=True)]
    largest = max(apart)
    where = f"at most {largest:.1g} apart, at step {apart.index(largest) + 1}"
    if not largest:
        return f"The first {count} losses match {named}, to the bit."
    if largest <= NEAR:
        return f"The first {count} losses match {named} up to rounding ({where}, relative)."
    platform = jax.default_backend()
    why = f"the devices are {platform.upper()}s, the reference's were CPUs; " if platform != "cpu" else ""
    first = next(number for number, difference in enumerate(apart, 1) if difference > NEAR)
    return (
        f"The first {count} losses differ from {named}: {where}, relative; more than {NEAR:g} from step {first} on. {why}"
        "A difference that starts near 1e-7 and grows comes from sums in another order (CPU, number of devices, version); "
        "one that is large at step 1 means that something else is computed."
    )
