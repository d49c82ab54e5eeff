"""A model from wherever it is: a run directory of train.py, a published folder, a hub's id."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxformer import hf
from jaxformer.config import Execution, ModelConfig
from jaxformer.hf.config_reader import read_json
from jaxformer.hf.hub import GENERATION, copy_generation_config, locate
from jaxformer.hf.load import prepare
from jaxformer.nn import model
from jaxformer.parallel import multihost
from jaxformer.tokenizers import tokenizer
from jaxformer.training import run
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.directory import beginning, has_saved
from jaxformer.training.failures import during

BALANCE = ("balance_loss", "router_z_loss", "balance_rate")
"""What keeps experts in use comes with a published model, unless the run says otherwise."""


def is_published(folder: Path) -> bool:
    """Whether a folder, if it is one at all, is no run of train.py."""
    path = folder / "config.json"
    return not folder.is_dir() or (path.is_file() and "model_type" in read_json(path))


def load(where: str | Path) -> tuple[ModelConfig, dict, Any]:
    """``cfg, params, tok`` of a run directory, a published folder or a hub's id. Errors as of ``jf.load``, ``jf.hf.load``."""
    if not is_published(Path(where)):
        return run.load(where)
    folder = locate(where)
    return *hf.load(folder), tokenizer.load(folder)


def ends(where: str | Path, tok: Any) -> tuple[int, ...]:
    """The ids that end an output: the tokenizer's eos, and those that a published model adds, such as the end of a turn."""
    path = locate(where) / GENERATION
    named = read_json(path).get("eos_token_id") if path.is_file() else None
    ids = named if isinstance(named, list) else [] if named is None else [named]
    return tuple(dict.fromkeys(i for i in (tok.eos_id, *ids) if i >= 0))


def begin(config: run.Config) -> tuple[run.Config, Any, Callable[..., dict] | None]:
    """A config whose model is the one that ``init.from`` names; its tokenizer, None where the run or the config has one; and a
    function that reads its parameters (of shapes, with the shardings they are to have or without), None for fresh ones.

    Raises ValueError, before anything large is read, where a run that exists began elsewhere, and where model and data
    cannot be had together.
    """
    init, directory = config.init, Path(config.run_dir)
    before = run.begun(directory)
    if before is not None and before.init != init:
        sources = [i.folder or "fresh parameters" for i in (before.init, init)]
        raise ValueError(f"{directory} began from {sources[0]}, not from {sources[1]}; choose another --run-dir")
    if init.folder is None:
        return config, None, None
    if before is not None:  # the folder may be gone, and is needed only where the run was stopped before its first checkpoint
        return _adopt(config, before.model), None, lambda like=None: _prepare(config)[1](like)
    cfg, read = _prepare(config)
    if not cfg.causal and config.data.task == "text":
        raise ValueError(f"{init.folder} is no language model: its tokens see those after them, which is what it would learn")
    return _adopt(config, cfg), _tokenizer(config, cfg), read


def write_run(directory: Path, config: run.Config, tok: Any) -> None:
    """``run.write_run``, and the ids that end an output of the model of ``init.from``, beside the tokenizer's eos."""
    if multihost.first():
        where, begins = config.init.folder, not has_saved(directory)
        with during(f"could not write to {directory}", directory), beginning(directory):
            run.write_run(directory, config, tok)
            if where is not None and begins:
                copy_generation_config(locate(where, config.init.revision), directory)
    multihost.shared(directory / "config.json")


def _prepare(config: run.Config) -> tuple[ModelConfig, Callable[..., dict]]:
    """The model of ``init.from``, and a function that reads its parameters in the dtype of the config's."""
    where, dtype = str(config.init.folder), config.model.param_dtype
    if is_published(Path(where)):
        cfg, published = prepare(where, dtype, revision=config.init.revision)
        return cfg, lambda like=None: published(_shardings(like))
    cfg = run.read_run(Path(where)).model
    checkpoints = Checkpoints(Path(where) / "checkpoints")
    if not checkpoints.steps():
        raise FileNotFoundError(f"{where} has no checkpoint")

    def read(like: Any = None) -> dict:
        params = run.load(where, _shardings(like))[1]
        return jax.tree.map(lambda array, param: array.astype(param.dtype or dtype), params, model.spec(cfg))

    return cfg, read


def _shardings(like: Any) -> Any:
    shardings = jax.tree.map(lambda shape: shape.sharding, like)
    known = like is not None and all(sharding is not None for sharding in jax.tree.leaves(shardings))
    return shardings if known else None


def _tokenizer(config: run.Config, cfg: ModelConfig) -> Any:
    """The tokenizer of the data where it is a path, else the model's. Raises ValueError for one that does not fit the model."""
    asked, where = config.data.tokenizer, str(config.init.folder)
    made_here = asked in tokenizer.KINDS and asked != "byte"
    tok = tokenizer.load(locate(where, config.init.revision) if made_here else asked)
    if tok.vocab_size > cfg.vocab_size:
        name = where if made_here else asked
        raise ValueError(f"the tokenizer of {name} has {tok.vocab_size} ids, the model of {where} rows for {cfg.vocab_size}")
    if cfg.encoder_layers and cfg.start_token != tok.bos_id:
        start = f"start with id {cfg.start_token}"
        raise ValueError(f"{where}: its targets {start}, and those of the data would with the tokenizer's bos, {tok.bos_id}")
    return tok


def _adopt(config: run.Config, cfg: ModelConfig) -> run.Config:
    """``config`` with the architecture of ``cfg``, computed as ``config`` says."""
    execution, default = config.model.execution, Execution()
    balance = {name: getattr(cfg.execution, name) for name in BALANCE if getattr(execution, name) == getattr(default, name)}
    execution = dataclasses.replace(execution, **balance)
    model_cfg = dataclasses.replace(cfg, execution=execution, param_dtype=config.model.param_dtype)
    return dataclasses.replace(config, model=model_cfg)
