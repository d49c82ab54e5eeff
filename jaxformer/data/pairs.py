"""Pairs of a source and a target text for an encoder–decoder, and their batches."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer.config.textfile import require_regular
from jaxformer.data import dates, packing, remote, text
from jaxformer.data.config import DataConfig
from jaxformer.data.folder import absent
from jaxformer.data.packing import ALL, Batch, Batches, Rows, Stream
from jaxformer.data.text import held_out
from jaxformer.tokenizers.tokenizer import Tokenizer

Pair = tuple[str, str]
GENERATED = 1_000  # pairs of the dates task's validation and test


class Pairs(NamedTuple):
    """Parallel text in its two splits."""

    train: list[Pair]
    validation: list[Pair]
    skipped: int
    """Lines left out because a side is empty."""


class Encoded(NamedTuple):
    """Pairs as ids, those that fit only."""

    sources: Stream
    targets: Stream
    kept: np.ndarray
    """int64: numbers of the pairs that fit."""
    dropped: int
    """Pairs with more tokens than source_length or, with bos or eos, length."""
    needed: str
    """The sizes that would fit all pairs."""


def read(cfg: DataConfig) -> Pairs:
    """Reads the pairs of ``cfg``. Held out are those of ``validation_path``, else some, by a hash of the source.

    Raises ValueError, naming file and line, for files of unequal length and lines that are not "source, tab, target".
    """
    if not cfg.path:
        raise ValueError("data.task='pairs' needs data.path: a TSV, or the source side of parallel text with data.target_path")
    pairs, skipped = _side_by_side(cfg.path, cfg.target_path) if cfg.target_path else _table(cfg.path)
    if not pairs:
        raise ValueError(f"data.path={cfg.path!r} holds no pairs")
    if cfg.validation_path:
        validation, more = _table(cfg.validation_path)
        if not validation:
            raise ValueError(f"data.validation_path={cfg.validation_path!r} holds no pairs")
        return Pairs(pairs, validation, skipped + more)
    held = held_out((source for source, _ in pairs), cfg.validation_fraction)
    return Pairs([p for p in pairs if p[0] not in held], [p for p in pairs if p[0] in held], skipped)


def encode(tok: Tokenizer, pairs: Sequence[Pair], cfg: DataConfig) -> Encoded:
    """Ids of both sides, kept on disk by content; pairs that do not fit into a row are counted, not cut."""
    sources = packing.encode(tok, [source for source, _ in pairs], eos=False)
    targets = packing.encode(tok, [target for _, target in pairs], eos=False)
    source_lengths, target_lengths = (
        np.diff(sources.bounds),
        np.diff(targets.bounds) + 1,
    )  # a target with bos, or with eos
    fits = (source_lengths <= cfg.source_length) & (target_lengths <= cfg.length)
    needed = f"source_length={source_lengths.max(initial=1)} and length={target_lengths.max(initial=1)}"
    return Encoded(sources, targets, np.flatnonzero(fits), int((~fits).sum()), needed)


def make_batch(sources: Sequence[Any], targets: Sequence[Any], cfg: DataConfig, tok: Tokenizer) -> Batch:
    """source [B, S] int32 and source_valid [B, S] bool; tokens (bos, target) and targets (target, eos) [B, T] int32
    with weights [B, T] float32, 0 on padding. An empty source and target make a row without weight.

    Raises ValueError for a pair that does not fit.
    """
    source, source_valid = packing.pad(sources, cfg.source_length, tok.pad_id)
    rows = [[tok.bos_id, *target, tok.eos_id] if len(target) else [] for target in targets]
    batch = packing.next_token(*packing.pad(rows, cfg.length + 1, tok.pad_id))
    return {"source": source, "source_valid": source_valid, **batch}


def train_batches(encoded: Encoded, cfg: DataConfig, tok: Tokenizer, rows: Rows = ALL) -> Any:
    """Endless training batches of the pairs: ``train[step]`` is that step's, every epoch in a new order."""
    if not len(encoded.kept):
        raise ValueError(
            f"no training pair fits data.source_length={cfg.source_length} and data.length={cfg.length}; "
            f"{encoded.needed} would fit all"
        )
    order = packing.endless(len(encoded.kept), cfg.seed)
    batches = order.batch(cfg.batch_size, batch_fn=np.array)
    return batches.map(lambda order_B: _numbered(encoded, encoded.kept[order_B[rows]], cfg, tok))


def validation_batches(encoded: Encoded, cfg: DataConfig, tok: Tokenizer, rows: Rows = ALL) -> Batches:
    """Batches of one shape of the pairs in their order; rows that fill the last one have weight 0."""
    chosen = encoded.kept[packing.evenly(len(encoded.kept), cfg.validation_rows)]

    def make(numbers_B: np.ndarray) -> Batch:
        return _numbered(encoded, numbers_B[rows], cfg, tok)

    return packing.in_batches(chosen, -1, cfg.batch_size, make)  # number -1 is an empty pair


def date_batches(cfg: DataConfig, tok: Tokenizer, rows: Rows = ALL) -> Any:
    """Endless training batches of the dates task: every epoch writes each training date once, in a random way."""
    days = dates.splits()[0]
    drawn = packing.endless(len(days), cfg.seed)
    batches = drawn.random_map(lambda i, rng: dates.draw(days[i], rng)).batch(cfg.batch_size, batch_fn=list)

    def make(pairs: list[Pair]) -> Batch:
        chosen = [pairs[i] for i in np.arange(len(pairs))[rows]]
        sources, targets = (tok.encode_batch(side) for side in zip(*chosen, strict=True))
        return make_batch(sources, targets, cfg, tok)

    return batches.map(make)


def _numbered(encoded: Encoded, numbers_B: np.ndarray, cfg: DataConfig, tok: Tokenizer) -> Batch:
    def ids(stream: Stream, i: int) -> np.ndarray:
        return stream.tokens[stream.bounds[i] : stream.bounds[i + 1]] if i >= 0 else stream.tokens[:0]

    sources, targets = ([ids(side, i) for i in numbers_B] for side in (encoded.sources, encoded.targets))
    return make_batch(sources, targets, cfg, tok)


def _table(path: str | None) -> tuple[list[Pair], int]:
    pairs, skipped = [], 0
    for number, line in enumerate(_lines(path), 1):
        if not line:
            continue
        source, *rest = line.split("\t")
        if len(rest) != 1:
            hint = "; give the target side as target_path if this is one side of parallel text" if not rest else ""
            raise ValueError(f"{path}, line {number}: a line must be source, tab, target, but it has {len(rest)} tabs{hint}")
        if source and rest[0]:
            pairs.append((source, rest[0]))
        else:
            skipped += 1
    return pairs, skipped


def _side_by_side(path: str | None, target_path: str) -> tuple[list[Pair], int]:
    sources, targets = _lines(path), _lines(target_path)
    if len(sources) != len(targets):
        raise ValueError(
            f"{path} has {len(sources)} lines and {target_path} {len(targets)}: parallel text needs the same number in both"
        )
    pairs = [(source, target) for source, target in zip(sources, targets, strict=True) if source and target]
    return pairs, len(sources) - len(pairs)


def _lines(path: str | None) -> list[str]:
    """Lines without their ends; the last may lack one."""
    file = Path(remote.local(path or "")).expanduser()
    require_regular(file)
    if not os.path.isfile(file):
        raise ValueError(f"{path} is a folder, but pairs are read from files" if os.path.isdir(file) else absent(str(file)))
    lines = text.read(file).split("\n")
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]
