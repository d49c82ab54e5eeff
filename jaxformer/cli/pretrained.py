"""A model from wherever it is: a run directory of train.py, a published folder, a hub's id."""

import contextlib
import dataclasses
import difflib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxformer import hf
from jaxformer.cli import texts
from jaxformer.config import Execution, ModelConfig
from jaxformer.config.strict import fits
from jaxformer.data import Data
from jaxformer.hf.hub import GENERATION, copy_generation_config, generation_config, locate
from jaxformer.hf.load import prepare
from jaxformer.nn import model
from jaxformer.parallel import multihost
from jaxformer.tokenizers import tokenizer
from jaxformer.tokenizers.json_files import read_json
from jaxformer.training import run, shipped
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.digest import summaries
from jaxformer.training.directory import beginning
from jaxformer.training.failures import during

BALANCE = ("balance_loss", "router_z_loss", "balance_rate")
"""What keeps experts in use comes with a published model, unless the run says otherwise."""


def is_published(folder: Path) -> bool:
    """Whether a folder, if it is one at all, is no run of train.py."""
    path = folder / "config.json"
    return not folder.is_dir() or (path.is_file() and "model_type" in read_json(path))


def load(where: str | Path, trust: bool = False) -> tuple[ModelConfig, dict, Any]:
    """``cfg, params, tok`` of a run directory, a published folder or a hub's id. trust: as of ``jf.load``. Errors as of
    ``jf.load``, ``jf.hf.load``."""
    where = os.path.expanduser(where)
    if not is_published(Path(where)):
        return run.load(where, trust=trust)
    _require_run(Path(where))
    folder = locate(where)
    return *hf.load(folder), tokenizer.load(folder)


def _require_run(path: Path) -> None:
    """Raises FileNotFoundError for a folder in ``runs/`` that does not exist, and for the bare name of one that does: that is
    a run, not a model on a hub."""
    if path.exists():
        return
    if len(path.parts) == 1 and (Path("runs") / path).is_dir():
        raise FileNotFoundError(f"there is no folder {path}; did you mean {Path('runs') / path}?")
    if path.parent.name != "runs":
        return
    newest = sorted(path.parent.glob("*/"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    if difflib.get_close_matches(path.name, [folder.name for folder in newest]):
        return  # a misspelt name: ``locate`` says which one is meant
    more = f" and {len(newest) - 3} more" if len(newest) > 3 else ""
    runs = f" Runs that exist: {', '.join(map(str, newest[:3]))}{more}." if newest else ""
    train = f" To train it: uv run train.py configs/{path.name}.py" if path.name in shipped.names() else ""
    raise FileNotFoundError(f"there is no run in {path}.{runs}{train}")


def ends(where: str | Path, tok: Any) -> tuple[int, ...]:
    """The ids that end an output: the tokenizer's eos, and those that a published model adds, such as the end of a turn. An id
    that the tokenizer does not have is never chosen, and left out. Raises ValueError for what is no id."""
    named = generation_config(locate(where)).get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if wrong := [i for i in ids if not fits(i, int) or i >= 2**31]:
        raise ValueError(f"{where}: eos_token_id={wrong[0]!r} is not the id of a token")
    return tuple(dict.fromkeys(i for i in (tok.eos_id, *ids) if 0 <= i < tok.vocab_size))


def digest(params: Any) -> str:
    """A short hash of all parameters."""
    return hashlib.sha256(repr(summaries(params)).encode()).hexdigest()[:16]


def begin(config: run.Config, trust: bool = False) -> tuple[run.Config, Any, Callable[..., dict] | None]:
    """A config whose model is the one that ``init.from`` names; its tokenizer, None where the run or the config has one; and a
    function that reads its parameters (of shapes, with the shardings they are to have or without), None for fresh ones. trust:
    whether to follow the import paths of the run that ``init.from`` names, which runs code.

    Raises ValueError, before anything large is read, where a run that exists began elsewhere, and where model and data
    cannot be had together.
    """
    init, directory = config.init, Path(config.run_dir)
    before = run.read_former(config, trust)
    if before is not None and before.init != init:
        sources = [i.folder or "fresh parameters" for i in (before.init, init)]
        raise ValueError(f"the run in {directory} began from {sources[0]}, not from {sources[1]}; choose another --run-dir")
    if init.folder is None:
        return config, None, None
    if before is not None:  # the folder may be gone, and is needed only where the run was stopped before its first checkpoint
        return _adopt(config, before.model), None, lambda like=None: _prepare(config, trust)[1](like)
    cfg, read = _prepare(config, trust)
    if not cfg.causal and config.data.task == "text":
        raise ValueError(
            f"{init.folder} is not a language model: each of its tokens sees the tokens that it would have to predict"
        )
    return _adopt(config, cfg), _tokenizer(config, cfg), read


def write_run(directory: Path, config: run.Config, corpus: Data) -> None:
    """``run.write_run``, the hashes of its texts, and the ids that end an output of the model of ``init.from``, beside the
    tokenizer's eos."""
    if multihost.first():
        where = config.init.folder
        with during(f"could not write to {directory}", directory), beginning(directory):
            run.write_run(directory, config, corpus.tokenizer)
            texts.write(directory, config.data, corpus)
            if where is not None and not (directory / GENERATION).exists():
                with contextlib.suppress(FileNotFoundError):  # a run that goes on does not need the folder it began from
                    copy_generation_config(locate(where, config.init.revision), directory)
    multihost.shared(directory / "config.json")


def _prepare(config: run.Config, trust: bool) -> tuple[ModelConfig, Callable[..., dict]]:
    """The model of ``init.from``, and a function that reads its parameters in the dtype of the config's."""
    where, dtype = str(config.init.folder), config.model.param_dtype
    where = os.path.expanduser(where)
    _require_run(Path(where))
    if is_published(Path(where)):
        cfg, published = prepare(where, dtype, revision=config.init.revision)
        return cfg, lambda like=None: published(_shardings(like))
    cfg = run.read_run(Path(where), trust).model
    checkpoints = Checkpoints(Path(where) / "checkpoints")
    if not checkpoints.steps():
        raise FileNotFoundError(f"{where} has no checkpoint yet; train that run until it has saved one")

    def read(like: Any = None) -> dict:
        params = run.load(where, _shardings(like), trust=trust)[1]
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
        raise ValueError(
            f"the tokenizer of {name} has {tok.vocab_size} ids, but the model of {where} has {cfg.vocab_size} rows"
        )
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
