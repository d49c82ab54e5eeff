"""A run: what ``train.py`` is told, where it keeps what it makes, and how that is loaded again."""

import dataclasses
import importlib.util
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

from jaxformer.config import ModelConfig
from jaxformer.config import spec as specs
from jaxformer.config.components import nearest
from jaxformer.config.strict import Strict, from_dict, to_json, within
from jaxformer.data import DataConfig
from jaxformer.nn import model
from jaxformer.parallel.multihost import DistributedConfig
from jaxformer.parallel.sharding import MeshConfig
from jaxformer.tokenizers import tokenizer
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.optim import OptimConfig


@dataclass(frozen=True)
class TrainConfig(Strict):
    """How long and how to train, and what to show."""

    steps: int = 1000
    """Updates in all."""
    eval_every: int = 250
    """Steps between evaluations, each with a sample; the state is saved then too."""
    log_every: int = 10
    """Steps between records in metrics.jsonl."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints to keep; the one of lowest validation loss is kept as well."""
    microbatches: int = 1
    """Parts that a batch is computed in, one after another: less memory, and the same numbers up to the masks of dropout
    and, with experts, to each part's own load in their balance loss."""
    label_smoothing: float = 0.0
    """Share of the target probability that is spread over the whole vocabulary."""
    loss_chunk: int | None = None
    """Positions whose logits exist at a time; None: all."""
    mtp_weight: float = 0.3
    """Weight of the loss of the token after the next, in a model with model.mtp."""
    parallel: Literal["jit", "pmap"] = "jit"
    """How the rows of a batch are spread over the devices."""
    seed: int = 0
    """Of the initial parameters and of dropout."""
    prompt: str = "def "
    """What samples continue."""
    sample_tokens: int = 200
    """Tokens in a sample; 0: none."""
    temperature: float = 0.8
    """Of samples."""

    def __post_init__(self):
        super().__post_init__()
        counts = ("steps", "eval_every", "log_every", "keep_checkpoints", "microbatches", "loss_chunk")
        within(self, 1, math.inf, *counts, prefix="train.")
        within(self, 0, math.inf, "sample_tokens", "temperature", "mtp_weight", prefix="train.")
        within(self, 0, 1, "label_smoothing", prefix="train.")


@dataclass(frozen=True)
class InitConfig(Strict):
    """What training begins from."""

    folder: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """A run directory, a Hugging Face folder or a hub's id, whose model is trained further: it decides the architecture and the
    tokenizer (unless data.tokenizer is a path). None: fresh parameters."""
    revision: str | None = None
    """Branch, tag or commit of a hub's id."""

    def __post_init__(self):
        super().__post_init__()
        if self.revision is not None and self.folder is None:
            raise ValueError("init.revision goes with init.from, the id of a hub")


@dataclass(frozen=True)
class Config(Strict):
    """A whole run."""

    model: ModelConfig
    """What the model is. Its vocab_size grows to the tokenizer's."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """What it is trained on."""
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    """How it is optimised."""
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    """How long, and what to show."""
    init: InitConfig = dataclasses.field(default_factory=InitConfig)
    """What to begin from."""
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    """How it is spread over devices."""
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    """How this process finds the others, where there are several."""
    run_dir: str = ""
    """Where everything is written, and where to go on from; runs/<config file's name> unless given."""

    def __post_init__(self):
        super().__post_init__()
        if self.train.parallel == "pmap" and self.mesh != MeshConfig():
            raise ValueError("train.parallel='pmap' gives every device a copy of the state: it goes with no axis of mesh")
        if self.train.parallel == "pmap" and self.distributed.on:
            raise ValueError(
                "train.parallel='pmap' is for one process: it does not go with distributed; jit, the default, does"
            )


FITTED = ("model.vocab_size", "model.start_token")
"""Fields that a run fits to its tokenizer."""


def parse(arguments: list[str], default: Path) -> Config:
    """``[CONFIG.py] [--field value ...]`` as a config; ``--help`` explains every field."""
    path = Path(arguments[0]) if arguments and not arguments[0].startswith("-") else default
    config, description = read_config(path)
    if not config.run_dir:
        config = dataclasses.replace(config, run_dir=str(Path("runs") / path.stem))
    rest = arguments[1:] if path is not default else arguments
    asked = tyro.cli(Config, default=config, args=rest, description=f"{path.name}: {description}", prog="train.py [CONFIG.py]")
    if asked.init.folder is not None:
        old, new = _fields(config.model), _fields(asked.model)
        decided = [
            name for name in new if old[name] != new[name] and not name.startswith("execution.") and name != "param_dtype"
        ]
        if decided:
            flags = ", ".join(f"--model.{name.replace('_', '-')}" for name in decided)
            raise ValueError(f"{flags} would have no effect with --init.from: the model that is trained further decides")
    return asked


def read_config(path: Path) -> tuple[Config, str]:
    """The ``config`` of a Python file, and the file's docstring."""
    if not path.is_file():
        known = [str(p) for folder in {path.parent, Path("configs")} for p in folder.glob("*.py")]
        raise ValueError(f"no config file {path}{nearest(str(path), known)}")
    loader = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    assert loader and loader.loader
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    config = getattr(module, "config", None)
    if not isinstance(config, Config):
        raise ValueError(f"{path} must define config = jaxformer.Config(...), not {type(config).__name__}")
    return config, (module.__doc__ or "").strip()


def open_run(config: Config) -> tuple[Path, Any, list[str]]:
    """The run's directory, its tokenizer if it has one already, and what differs from how the run began.

    Raises ValueError if the directory holds a run of another architecture, or one that cannot be read.
    """
    directory = Path(config.run_dir)
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; choose another --run-dir")
    if directory.is_dir() and not (directory / "config.json").exists() and any(directory.iterdir()):
        raise ValueError(f"{directory} exists and is not a run: it has no config.json; choose another --run-dir")
    if not (directory / "config.json").exists():
        return directory, None, []
    before = read_run(directory)
    old, new = _fields(before), _fields(config)
    changed = [name for name in new if name != "run_dir" and old.get(name) != new[name]]
    _refuse_architecture(before.model, config.model, changed, old, new, directory)
    notes = [f"{name}: {old.get(name)} -> {new[name]}" for name in changed if name not in FITTED]
    return directory, tokenizer.load(directory), notes


def write_run(directory: Path, config: Config, tok: Any) -> None:
    """Writes config.json and the tokenizer; the run can then be loaded and gone on with."""
    text = to_json(config)  # refuses before anything is written
    directory.mkdir(parents=True, exist_ok=True)
    tok.save(directory)
    partial = directory / "config.json.tmp"
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, directory / "config.json")


def read_run(directory: Path) -> Config:
    """The config of a run. Raises ValueError or FileNotFoundError that says what is wrong with it."""
    path = directory / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{directory} is not a run directory: it has no config.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"it holds {type(values).__name__}, not the fields of a run")
        return from_dict(Config, values)
    except (ValueError, TypeError) as error:  # not UTF-8, not JSON, unknown or missing fields
        raise ValueError(f"{path} cannot be read: {error}") from error


def load(run_directory: str | Path, shardings: Any = None) -> tuple[ModelConfig, dict, Any]:
    """``cfg, params, tok`` of what ``train.py`` wrote: the newest whole checkpoint. shardings: where each parameter is to lie.

    Raises FileNotFoundError where there is no run or no checkpoint, ValueError where the two do not fit.
    """
    directory = Path(run_directory)
    cfg = read_run(directory).model
    like = specs.abstract(model.spec(cfg), cfg)
    if shardings is not None:
        like = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), like, shardings)
    checkpoints = Checkpoints(directory / "checkpoints")
    try:
        params = checkpoints.restore_params(like)
    finally:
        checkpoints.close()
    return cfg, params, tokenizer.load(directory)


def fit_tokenizer(cfg: ModelConfig, tok: Any) -> ModelConfig:
    """``cfg`` with a vocabulary that holds the tokenizer's, and the start token of an encoder–decoder."""
    cfg = dataclasses.replace(cfg, vocab_size=max(cfg.vocab_size, tok.vocab_size))
    if cfg.encoder_layers and cfg.start_token is None:
        cfg = dataclasses.replace(cfg, start_token=tok.bos_id)
    return cfg


def _fields(config: Any, prefix: str = "") -> dict[str, Any]:
    """``dotted name -> value``."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat |= _fields(value, f"{prefix}{field.name}.")
        else:
            flat[prefix + field.name] = value
    return flat


def _refuse_architecture(before: ModelConfig, now: ModelConfig, changed, old, new, directory: Path) -> None:
    # Another max_length of a learned table is another shape, which the checkpoint refuses.
    free = ("model.execution.", "model.max_length")
    fixed = [name for name in changed if name.startswith("model.") and not name.startswith(free)]
    # The file's vocab_size and start_token have been fitted to the tokenizer; the command line's not yet.
    if new["model.vocab_size"] <= old["model.vocab_size"]:
        now = dataclasses.replace(now, vocab_size=before.vocab_size, start_token=before.start_token)
        fixed = [name for name in fixed if name not in FITTED]
    if not fixed:
        return
    shapes = [{p: param.shape(cfg) for p, param in specs.walk(model.spec(cfg))} for cfg in (now, before)]
    lines = [f"  {name}: {old.get(name)} there, {new[name]} now" for name in fixed]
    tree = specs.diff(*shapes)
    raise ValueError(
        f"{directory} holds a run of another architecture; choose another --run-dir, or go back:\n"
        + "\n".join(lines + (["parameters (expected now, found there):", *tree] if tree else []))
    )
