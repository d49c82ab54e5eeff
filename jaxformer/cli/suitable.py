"""Whether model, data and objective of a run go together: what training could only waste time on is refused before anything
is written. An objective or a data set of a user's own decides that for itself."""

import logging
from pathlib import Path

from jax.sharding import Mesh

from jaxformer.cli import texts
from jaxformer.cost import memory
from jaxformer.data import Data
from jaxformer.data.config import TASKS
from jaxformer.nn import cache_spec
from jaxformer.parallel import multihost
from jaxformer.training import tracking
from jaxformer.training.config import NEXT_TOKEN, Config

log = logging.getLogger(__name__)
PADDING = 128
"""Fewer unused rows than this are the usual padding of a vocabulary to a size that devices compute quickly."""


def check(config: Config, mesh: Mesh) -> None:
    """Raises ValueError for a model that the data does not fit, or that next-token training cannot use, for one that is larger
    than the memory, and for an experiment tracker that is not installed."""
    tracking.check(config.train.track)
    if config.data.task in TASKS and config.train.objective == NEXT_TOKEN:
        _check_model(config)
        _check_decoding(config)
    memory.check(config, mesh)


def _check_model(config: Config) -> None:
    cfg, task = config.model, config.data.task
    if cfg.encoder_layers and task == "text":
        raise ValueError("data.task='text' has no source for an encoder (model.encoder_layers above 0); use pairs or dates")
    if not cfg.encoder_layers and task != "text":
        raise ValueError(f"data.task={task!r} has source sequences, which only an encoder reads; set model.encoder_layers")
    wrong = {
        "causal=False: each token sees the one that it is to predict": not cfg.causal,
        "has_head=False: it gives no logits": not cfg.has_head,
        f"token_types={cfg.token_types}: the data has one type only": cfg.token_types > 0,
        "pooler=True: the loss reads no pooled token": cfg.pooler,
    }
    for reason, applies in wrong.items():
        if applies:
            raise ValueError(
                f"next-token training cannot use model.{reason}; change the model, or give an objective of your own "
                "(train.objective='package.module:name')"
            )


def _check_decoding(config: Config) -> None:
    """Samples and translations are decoded, the first of them after the first evaluation: what attention keeps of a sequence
    is checked before."""
    if not config.train.sample_tokens:
        return
    try:
        for cfg in config.model.layers:
            cache_spec.layer_spec(cfg)
    except ValueError as error:
        raise ValueError(f"{error}. To train without samples, set train.sample_tokens=0") from error


def check_data(config: Config, corpus: Data) -> list[str]:
    """What to say about a text that has changed since the run began. Raises ValueError where it must not have (see
    ``texts.changes``), as ``check_lengths``, and for a prompt that could not be encoded at the first sample."""
    said = texts.changes(Path(config.run_dir), config.data, corpus)
    check_lengths(config, corpus)
    _say_unused(config, corpus)
    if config.train.sample_tokens and not config.model.encoder_layers:
        corpus.tokenizer.encode(config.train.prompt)
    return said


def _say_unused(config: Config, corpus: Data) -> None:
    """Logs how many rows of a fresh model's table no token of the data uses, where they are more than padding."""
    size, used = config.model.vocab_size, corpus.tokenizer.vocab_size
    if config.init.folder is None and size - used >= PADDING and multihost.first():
        log.warning(
            "model.vocab_size=%d, but the tokenizer has %d ids: %d rows of the token table are never used, and the first loss "
            "is near ln %d; set model.vocab_size=%d to leave them out",
            *(size, used, size - used, size, used),
        )


def check_lengths(config: Config, corpus: Data) -> None:
    """Raises ValueError where rows have positions that a learned table has no row for: they would train into NaN."""
    cfg = config.model
    if "learned" not in cfg.positions or config.train.objective != NEXT_TOKEN:
        return
    for what, (name, positions) in corpus.positions().items():
        if positions > cfg.max_length:
            asked = f"data.{name}={getattr(config.data, name)}"
            raise ValueError(
                f"{what} have up to {positions} positions ({asked}), more than the {cfg.max_length} of the learned table "
                f"(model.max_length): raise model.max_length to {positions}, or lower data.{name} to {cfg.max_length}"
            )
