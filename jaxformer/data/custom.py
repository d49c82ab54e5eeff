"""Data sets of a user's own: what ``data.task="package.module:name"`` leads to, and batches from a Python iterator."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxformer.config.components import imported, required
from jaxformer.data.config import DataConfig
from jaxformer.data.packing import ALL, Batch, Batches, Rows
from jaxformer.tokenizers import tokenizer as tokenizers
from jaxformer.tokenizers.tokenizer import Tokenizer


def load(cfg: DataConfig, tok: Tokenizer | None, rows: Rows) -> dict[str, Any]:
    """The fields of ``data.Data``, of the data set that ``cfg.task`` leads to: a function of the ``DataConfig``, which is also
    given ``tokenizer=`` (that of the run or the model, None if there is none yet) and ``rows=`` (the numbers of the rows of
    each batch that this process needs) if it has such parameters.

    It returns an object with ``train``, where ``train[step]`` is the batch of any step from 0, and ``validation``, a sequence
    of batches, perhaps empty. Batches are dicts of arrays whose first axis is ``cfg.batch_size`` rows. The other fields of
    ``Data`` may be attributes as well. Raises ValueError for a name that leads nowhere and an object that lacks these.
    """
    make = imported("data.task", cfg.task)
    if not callable(make):
        raise ValueError(f"data.task={cfg.task!r} must be a function of the DataConfig, not {make!r}")
    parameters = inspect.signature(make).parameters
    keywords = {name: value for name, value in (("tokenizer", tok), ("rows", rows)) if name in parameters}
    data = make(*(cfg,)[: required(make)], **keywords)
    if lacks := [name for name in ("train", "validation") if not hasattr(data, name)]:
        raise ValueError(f"data.task={cfg.task!r} made {type(data).__name__}, which lacks {' and '.join(lacks)}")
    chosen = ALL if "rows" in keywords else rows
    validation = data.validation
    return {
        "tokenizer": getattr(data, "tokenizer", None) or tok or _tokenizer(cfg),
        "train": Steps(data.train, chosen),
        "validation": Batches(len(validation), lambda i: _rows_of(validation[i], chosen)),
        "validation_bytes": getattr(data, "validation_bytes", 0),
        "test_pairs": getattr(data, "test_pairs", []),
        "summary": getattr(data, "summary", {}),
        "content_hash": getattr(data, "content_hash", ""),
    }


def _rows_of(batch: Batch, rows: Rows) -> Batch:
    return {name: x[rows] for name, x in batch.items()}


def _tokenizer(cfg: DataConfig) -> Tokenizer:
    """That of ``cfg``: bytes, where it says nothing else, for the samples and the run directory."""
    if cfg.tokenizer in ("byte", DataConfig().tokenizer):
        return tokenizers.train("byte", [])
    if cfg.tokenizer in tokenizers.KINDS:
        how = "give it an attribute tokenizer, or set data.tokenizer to byte or a path"
        raise ValueError(f"data.task={cfg.task!r} has no text to train a {cfg.tokenizer} tokenizer on: {how}")
    return tokenizers.load(cfg.tokenizer)


class Steps:
    """``train`` of a user's data set: this process's ``rows`` of each batch."""

    def __init__(self, train: Any, rows: Rows = ALL):
        self._train, self._rows = train, rows

    def __getitem__(self, step: int) -> Batch:
        try:
            return _rows_of(self._train[step], self._rows)
        except IndexError as error:
            raise ValueError(f"the data set has no batch for step {step}: {error}") from error


class FromIterator:
    """``train`` of a data set, from a Python iterator: ``batches()`` returns one that gives the batches of steps 0, 1, 2, ...

    A run that is continued asks for a later step first: the batches before it are made and dropped, and the run continues
    exactly only if ``batches()`` gives the same sequence every time. A data set whose ``train[step]`` is a function of the step
    needs neither. Batches are not prefetched.
    """

    def __init__(self, batches: Callable[[], Iterable[Batch]]):
        self._batches = batches
        self._iterator: Iterator[Batch] = iter(())
        self._next = -1  # not begun

    def __getitem__(self, step: int) -> Batch:
        """The batch of ``step``. Raises IndexError where the iterator ends before it."""
        if not 0 <= self._next <= step:
            self._iterator, self._next = iter(self._batches()), 0
        for batch in self._iterator:
            self._next += 1
            if self._next > step:
                return batch
        raise IndexError(f"the iterator ended after {self._next} batches")
