"""A run: its command line, the state and update that it trains with, the directory that keeps it, and how to load it again."""

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import tyro

from jaxformer.config import ModelConfig
from jaxformer.config import spec as specs
from jaxformer.config.components import imported, required
from jaxformer.config.strict import from_dict, import_paths, to_dict
from jaxformer.nn import model
from jaxformer.parallel import exit_codes
from jaxformer.training import objective as objectives
from jaxformer.training import shipped
from jaxformer.training import update as updates
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.config import NEXT_TOKEN, Command, Config, InitConfig, TrainConfig
from jaxformer.training.directory import CHECKPOINTS, expanded, has_saved, is_unbegun
from jaxformer.training.optim import initial_params, optimizer
from jaxformer.training.run_files import named, plain, read_run, read_tokenizer, verify_config, write_run

__all__ = ["Config", "InitConfig", "TrainConfig", "load", "parse", "read_run", "write_run"]

FITTED = ("model.vocab_size", "model.start_token")
"""Fields that ``fit_tokenizer`` sets."""


def parse(arguments: list[str], default: Path) -> Command:
    """``[CONFIG.py] [--field value ...] [--check]`` as a command; ``--help`` explains every field."""
    path = Path(arguments[0]) if arguments and not arguments[0].startswith("-") else default
    config, description = read_config(path)
    if not config.run_dir:
        config = dataclasses.replace(config, run_dir=str(Path("runs") / path.stem))
    rest = arguments[1:] if path is not default else arguments
    about, program = f"{path.name}: {description}\n\n{exit_codes.OF_TRAINING}", "train.py [CONFIG.py]"
    try:
        command = tyro.cli(Command, default=Command(config), args=rest, description=about, prog=program)
    except ValueError as error:  # fields of different records that contradict each other; tyro shows all other errors itself
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(exit_codes.USAGE) from error
    asked = command.config
    if asked.init.folder is not None:
        old, new = _fields(config.model), _fields(asked.model)
        changed = [name for name in new if old[name] != new[name]]
        decided = [name for name in changed if not name.startswith("execution.") and name != "param_dtype"]
        if decided:
            flags = ", ".join(f"--model.{name.replace('_', '-')}" for name in decided)
            raise ValueError(f"{flags} would have no effect with --init.from, whose model decides the architecture")
    return command


def at_home(config: Config) -> Config:
    """``config`` with the home directory for ``~`` in its paths. Raises ValueError as ``directory.expanded``."""
    names = ("path", "validation_path", "target_path", "tokenizer")
    paths: dict[str, Any] = {name: expanded(path) for name in names if (path := getattr(config.data, name)) is not None}
    data = dataclasses.replace(config.data, **paths)
    init = config.init
    if init.folder is not None:
        init = dataclasses.replace(init, folder=expanded(init.folder))
    return dataclasses.replace(config, data=data, init=init, run_dir=expanded(config.run_dir))


def read_config(path: Path) -> tuple[Config, str]:
    """The ``config`` of a Python file, or of a shipped one by its name, and the file's docstring."""
    path = shipped.find(path)
    loader = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    assert loader and loader.loader
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    config = getattr(module, "config", None)
    if not isinstance(config, Config):
        raise ValueError(f"{path} must define config = jaxformer.Config(...), not {type(config).__name__}")
    return config, (module.__doc__ or "").strip()


def open_run(config: Config, trust: bool = False) -> tuple[Path, Any, list[str]]:
    """The run's directory, its tokenizer if it has one already, and the fields that differ from how the run began. A run that
    has never saved a step has neither: it begins anew. trust: as of ``read_former``.

    Raises ValueError if the directory holds a run of another architecture, or one that cannot be read.
    """
    directory = Path(config.run_dir)
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; choose another --run-dir")
    if directory.is_dir() and not (directory / "config.json").exists() and not is_unbegun(directory):
        raise ValueError(f"{directory} exists but is not a run, as it has no config.json; choose another --run-dir")
    if (directory / "metrics.jsonl").is_dir():
        raise ValueError(f"{directory / 'metrics.jsonl'} is a folder; a run needs a file of that name for its metrics")
    if os.path.islink(directory / CHECKPOINTS) and not os.path.exists(directory / CHECKPOINTS):
        raise ValueError(f"{directory / CHECKPOINTS} is a link to a folder that cannot be reached; is its disk mounted?")
    before = read_former(config, trust)
    if before is None:
        return directory, None, []
    old, new = _fields(before), _fields(config)
    changed = [name for name in new if name not in ("run_dir", "data.accept_change") and old.get(name) != new[name]]
    _refuse_architecture(before.model, config.model, changed, old, new, directory)
    notes = [f"{name}: {old.get(name)} -> {new[name]}" for name in changed if name not in FITTED]
    return directory, read_tokenizer(directory), notes


def read_former(config: Config, trust: bool = False) -> Config | None:
    """The config of the run that ``config`` continues; None where its directory holds none, or one that has never saved a step.

    It may name the import paths that ``config`` names itself. Another objective, optimizer or data set is only compared, never
    imported. Raises ValueError, before anything is imported, for components at other import paths: as of another architecture
    where ``config`` decides on the model; unless trusted where the run does (``init.from``). Also for a config.json that has
    changed since it was written, unless trusted.
    """
    directory = Path(config.run_dir)
    if not (directory / "config.json").exists():
        return None
    values, is_saved = plain(directory)[0], has_saved(directory)
    theirs, ours = import_paths(Config, values), import_paths(Config, to_dict(config))
    others = [name for name in theirs if name.startswith("model.") and not set(theirs[name]) <= set(ours.get(name, ()))]
    if others and not is_saved:
        return None
    if others and config.init.folder is None:
        lines = [f"  {name}: {', '.join(theirs[name])} there, {getattr(config.model, name[6:])} now" for name in others]
        raise ValueError("\n".join([_another(directory), *lines]))
    with named(directory):
        former = from_dict(Config, values, trust or not others)
    if not is_saved:
        return None
    if not trust:
        verify_config(directory)
    return former


def make_objective(config: Config) -> objectives.Objective:
    """The objective that ``train.objective`` names: a function ``(params, batch, rng)``, or one of the ModelConfig and the
    TrainConfig (as many of them as it takes) that returns such a function. Raises ValueError where there is none."""
    cfg, train = config.model, config.train
    if train.objective == NEXT_TOKEN:
        options = {name: getattr(train, name) for name in ("label_smoothing", "loss_chunk", "mtp_weight", "z_loss")}
        return objectives.next_token(cfg, **options)
    make = imported("train.objective", train.objective)
    if not callable(make):
        raise ValueError(f"train.objective={train.objective!r} must be a function, not {type(make).__name__}")
    if required(make) == 3:  # an objective itself
        return make
    objective = make(*(cfg, train)[: required(make)])
    if not callable(objective):
        raise ValueError(f"train.objective={train.objective!r} made {objective!r}, not a function (params, batch, rng)")
    return objective


def make_update(config: Config, objective: objectives.Objective) -> Callable:
    """The update of a run, which minimises ``objective``."""
    return updates.make_update(objective, _optimizer(config), config.train.microbatches)


def initial_state(config: Config, params: Any = None) -> updates.TrainState:
    """The state of a run before its first update, with fresh parameters unless they are given."""
    params_key, rng = jax.random.split(jax.random.key(config.train.seed))
    if params is None:
        params = initial_params(config.optim, config.model, params_key)
    return updates.init_state(params, _optimizer(config), rng)


def _optimizer(config: Config) -> Any:
    return optimizer(config.optim, config.model, config.train.steps)


def load(
    run_directory: str | Path, shardings: Any = None, ema: bool | None = None, *, trust: bool = False
) -> tuple[ModelConfig, dict, Any]:
    """``cfg, params, tok`` of a run of ``train.py``, from its newest complete checkpoint. shardings: where each parameter is to
    lie; one device unless given. ema: whether to give the running mean of the parameters (``optim.ema``) in their place; unless
    given, if the run keeps one, which is then what it has evaluated. trust: whether to follow the import paths in the run's
    config.json (components, an objective, an optimizer or a data set of one's own), which runs their code, and to take a
    config.json that has been edited.

    Raises FileNotFoundError where there is no run or no checkpoint, ValueError where the two do not fit, for the mean of a run
    that keeps none, and, before anything is imported, for import paths without ``trust``.
    """
    directory = Path(run_directory)
    config = read_run(directory, trust)
    cfg, keeps = config.model, config.optim.ema > 0
    if ema and not keeps:
        raise ValueError(f"{directory} has no running mean of its parameters (optim.ema=0); leave out ema=True")
    like = specs.abstract(model.spec(cfg), cfg)
    if shardings is not None:
        like = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), like, shardings)
    checkpoints = Checkpoints(directory / "checkpoints")
    try:
        params = checkpoints.restore_params(like, ema=keeps if ema is None else ema)
    finally:
        checkpoints.close()
    if not trust:
        verify_config(directory)
    return cfg, params, read_tokenizer(directory)


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
        if dataclasses.is_dataclass(value) and field.name not in config.UNCHECKED:  # a component is compared as a whole
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
        "\n".join([_another(directory), *lines, *(["parameters (expected now, found there):", *tree] if tree else ())])
    )


def _another(directory: Path) -> str:
    return f"{directory} holds a run of another architecture; choose another --run-dir, or undo these changes:"
