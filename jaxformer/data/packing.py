"""One stream of tokens, cut into rows: what a row holds depends on its number and the seed alone."""

import io
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxformer.data.config import DataConfig
from jaxformer.tokenizers import disk_cache
from jaxformer.tokenizers.tokenizer import Tokenizer

log = logging.getLogger(__name__)
Batch = dict[str, np.ndarray]
Rows = slice | np.ndarray
"""Which rows of each batch are made, by number."""
ALL = slice(None)
_PIECE = 1_000_000  # characters encoded as one: lets threads share a long document
_GROUP = 4_000_000  # characters encoded between two conversions to arrays: bounds the memory that Python ints take


@dataclass(frozen=True)
class Stream:
    """Token sequences, end to end."""

    tokens: np.ndarray
    """int32 [tokens]."""
    bounds: np.ndarray
    """int64 [sequences + 1], ascending: sequence i is ``tokens[bounds[i]:bounds[i + 1]]``."""


@dataclass(frozen=True)
class Batches(Sequence[Any]):
    """A finite sequence of batches, each made when it is asked for."""

    size: int
    make: Callable[[int], Batch]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i) -> Any:
        if not -self.size <= i < self.size:
            raise IndexError(f"there is no batch {i}: the split has {self.size}")
        return self.make(i % self.size)


def encode(tok: Tokenizer, texts: Sequence[str], eos: bool) -> Stream:
    """The texts' tokens as one stream, each ended by eos where ``eos`` is set; kept on disk by content."""
    if eos and tok.eos_id < 0:
        raise ValueError(f"this {tok.kind} tokenizer has no eos id, which the end of a document needs")
    name = disk_cache.key("stream 1", tok.content_hash, int(eos), texts)
    file = io.BytesIO(disk_cache.cached("tokens", name, lambda: _encode(tok, texts, eos)))
    return Stream(np.load(file, allow_pickle=False), np.load(file, allow_pickle=False))


def _encode(tok: Tokenizer, texts: Sequence[str], eos: bool) -> bytes:
    arrays, lengths = [np.zeros(0, np.int32)], np.zeros(len(texts) + 1, np.int64)
    for group in _groups(_pieces(texts, _PIECE if tok.exact else None)):
        encoded = tok.encode_batch([piece for _, piece, _ in group])
        for (owner, _, is_last), ids in zip(group, encoded, strict=True):
            if eos and is_last:
                ids.append(tok.eos_id)
            lengths[owner + 1] += len(ids)
        arrays.append(np.fromiter(itertools.chain.from_iterable(encoded), np.int32))
    file = io.BytesIO()
    np.save(file, np.concatenate(arrays))
    np.save(file, np.cumsum(lengths))
    return file.getvalue()


def _pieces(texts: Sequence[str], most: int | None) -> Iterator[tuple[int, str, bool]]:
    """Every text in pieces of ``most`` characters: the text's number, the piece, whether it is the text's last."""
    for owner, text in enumerate(texts):
        size = most or len(text) or 1
        for at in range(0, len(text) or 1, size):
            yield owner, text[at : at + size], at + size >= len(text)


def _groups(pieces: Iterable[tuple[int, str, bool]]) -> Iterator[list[tuple[int, str, bool]]]:
    group, characters = [], 0
    for piece in pieces:
        group.append(piece)
        characters += len(piece[1])
        if characters >= _GROUP:
            yield group
            group, characters = [], 0
    if group:
        yield group


def pad(sequences: Sequence[Sequence[int]], width: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences as rows of ids [B, width] int32 and valid [B, width] bool.

    Validity depends on length, never on the id: padding may share its id with eos. Raises ValueError for a longer sequence.
    """
    ids = np.full((len(sequences), width), pad_id, np.int32)
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    for row, sequence in enumerate(sequences):
        if len(sequence) > width:
            raise ValueError(f"sequence {row} has {len(sequence)} tokens, more than the {width} that a row holds")
        ids[row, : len(sequence)] = sequence
    return ids, np.arange(width) < lengths[:, None]


def next_token(ids_BT1: np.ndarray, valid_BT1: np.ndarray) -> Batch:
    """Rows of T + 1 ids as tokens and targets [B, T] int32; weights [B, T] float32, 0 where the target is padding."""
    return {"tokens": ids_BT1[:, :-1], "targets": ids_BT1[:, 1:], "weights": valid_BT1[:, 1:].astype(np.float32)}


def windows(stream: Stream, starts_B: np.ndarray, length: int, pad_id: int, segment_documents: bool) -> Batch:
    """Rows of ``length`` tokens from each start, padded past the stream's end: a batch as ``next_token`` gives it.

    With ``segment_documents`` also segments [B, T] int32 (1, 2, ... along the row; padding has its own) and positions [B, T]
    int32 (from 0 in every segment, 0 on padding), and weights are 0 where token and target belong to different documents.
    """
    at_BT1 = starts_B[:, None] + np.arange(length + 1)
    valid_BT1 = at_BT1 < len(stream.tokens)
    ids_BT1 = np.where(valid_BT1, stream.tokens.take(at_BT1, mode="clip"), np.int32(pad_id))
    batch = next_token(ids_BT1, valid_BT1)
    if segment_documents:
        document_BT1 = np.searchsorted(stream.bounds, at_BT1, side="right")  # bounds end with the stream: then padding
        document_BT, at_BT = document_BT1[:, :-1], at_BT1[:, :-1]
        begin_BT = np.maximum(stream.bounds[document_BT - 1], starts_B[:, None])
        batch["weights"] *= document_BT == document_BT1[:, 1:]
        batch["segments"] = _ranks(document_BT)
        batch["positions"] = np.where(valid_BT1[:, :-1], at_BT - begin_BT, 0).astype(np.int32)
    return batch


def _ranks(ascending_BT: np.ndarray) -> np.ndarray:
    """1, 2, ... for the distinct values along each row."""
    steps = np.diff(ascending_BT, axis=1, prepend=ascending_BT[:, :1] - 1) > 0
    return np.cumsum(steps, axis=1, dtype=np.int32)


def train_batches(stream: Stream, cfg: DataConfig, pad_id: int, rows: Rows = ALL) -> Any:
    """Endless training batches: ``train[step]`` is that step's (only its ``rows``), whatever was asked for before.

    The stream is divided into strata of T starts; an epoch visits each stratum once, in a new order, and begins its
    row at a random start in it. So all starts are seen in time, and an epoch reads everything about once.
    """
    last = len(stream.tokens) - 1 - cfg.length  # the last start of a full row; negative if there is none
    if len(stream.tokens) < 2:
        raise ValueError(f"the training split has too few tokens to train on ({len(stream.tokens)}); give more text")
    if last < 0:
        log.warning(
            "the training split has %s tokens, fewer than one row: the rest of every row of data.length=%s is padding",
            f"{len(stream.tokens):,}",
            cfg.length,
        )

    def start(stratum: int, rng: np.random.Generator) -> int:
        low = stratum * cfg.length
        return low + int(rng.integers(max(1, min(cfg.length, last + 1 - low))))

    strata = endless(max(0, last) // cfg.length + 1, cfg.seed)
    starts = strata.random_map(start).batch(cfg.batch_size, batch_fn=np.array)
    return starts.map(lambda starts_B: windows(stream, starts_B[rows], cfg.length, pad_id, cfg.segment_documents))


def endless(count: int, seed: int) -> Any:
    """A Grain data set of the numbers below ``count``, in a new order every epoch, without end."""
    import grain

    # Grain counts the batches of its own endless data set in floating-point numbers: those of one row would be too many.
    return grain.MapDataset.range(count).seed(seed).shuffle().repeat(2**62 // count)


def most_positions(stream: Stream, cfg: DataConfig) -> int:
    """How many positions a training row has at most: those of its longest part of one document, or all of the row."""
    if not cfg.segment_documents:
        return cfg.length
    inputs = len(stream.tokens) - (len(stream.tokens) > cfg.length)  # in full rows the last token is a target only
    return int(min(cfg.length, (np.minimum(stream.bounds[1:], inputs) - stream.bounds[:-1]).max(initial=0)))


def validation_batches(stream: Stream, cfg: DataConfig, pad_id: int, rows: Rows = ALL) -> Batches:
    """Batches of one shape in which every token but the first is a target once (of evenly spread rows, with
    ``validation_rows``). Padding has weight 0."""
    count = -(-max(0, len(stream.tokens) - 1) // cfg.length)
    starts = evenly(count, cfg.validation_rows) * cfg.length

    def make(starts_B: np.ndarray) -> Batch:
        return windows(stream, starts_B[rows], cfg.length, pad_id, cfg.segment_documents)

    return in_batches(starts, len(stream.tokens), cfg.batch_size, make)  # a row past the end is all padding


def evenly(count: int, most: int) -> np.ndarray:
    """int64: all numbers below ``count``, or ``most`` of them, evenly spread (0 is all)."""
    chosen = min(count, most or count)
    return np.arange(chosen) * count // max(chosen, 1)


def in_batches(items: np.ndarray, filler: int, size: int, make: Callable[[np.ndarray], Batch]) -> Batches:
    """``make`` of every ``size`` items, the last ones filled up with ``filler``."""
    count = -(-len(items) // size)
    filled = np.append(items, np.full(count * size - len(items), filler, items.dtype)).reshape(count, size)
    return Batches(count, lambda i: make(filled[i]))


def target_bytes(batches: Batches, tok: Tokenizer) -> int:
    """UTF-8 bytes of all targets with a weight: the total nll in nats / ln 2 / this is bits per byte."""
    sizes = tok.token_bytes
    return sum(int(sizes[batch["targets"]][batch["weights"] > 0].sum()) for batch in batches)


def iterate(train: Any, start: int = 0) -> Iterator[Batch]:
    """``train[start], train[start + 1], ...``; those of the library's own data sets are prefetched by threads."""
    import grain

    if start < 0:
        raise ValueError(f"start={start} must be a step number of at least 0")
    if not isinstance(train, grain.MapDataset):
        return (train[step] for step in itertools.count(start))
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    return iter(train.slice(slice(start, None)).to_iter_dataset(options))
