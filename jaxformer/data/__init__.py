"""Text and pairs as batches that are a pure function of the step: ``load(cfg)``, then ``data.train[step]``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxformer.data import custom, dates, packing, pairs, text
from jaxformer.data.config import TASKS, DataConfig
from jaxformer.data.custom import FromIterator
from jaxformer.data.packing import ALL, Batch, Rows, iterate
from jaxformer.tokenizers import tokenizer as tokenizers
from jaxformer.tokenizers.disk_cache import key
from jaxformer.tokenizers.tokenizer import Tokenizer

__all__ = ["Data", "DataConfig", "FromIterator", "iterate", "load"]


@dataclass(frozen=True)
class Data:
    """What a run trains and validates on. The batches of text are described at ``packing.windows``, those of pairs at
    ``pairs.make_batch``."""

    tokenizer: Tokenizer
    train: Any
    """Endless: ``train[step]`` is that step's batch; ``iterate(train, step)`` gives it and those after, prefetched."""
    validation: Sequence[Batch]
    """Finite; every batch has the shape of a training batch, rows without data have weight 0."""
    validation_bytes: int
    """UTF-8 bytes of the validation targets: nll in nats, summed, / ln 2 / this is bits per byte."""
    test_pairs: list[tuple[str, str]]
    """Held-out (source, target) texts to decode: the test dates, or the validation pairs; empty for text."""
    summary: dict[str, int]
    """Counts to print: documents or pairs, characters, tokens, what was left out."""
    content_hash: str
    """Of all texts, by which processes know that they read the same, and a continued run that it goes on with them."""
    split_hashes: dict[str, str] = field(default_factory=dict)
    """The same of each split, by its name, where they are known."""
    positions: Callable[[], dict[str, tuple[str, int]]] = dict
    """By kind of row, which field of the DataConfig bounds it and how many positions it has at most, where that is known."""


def load(cfg: DataConfig, tok: Tokenizer | None = None, rows: Rows = ALL) -> Data:
    """Reads, tokenizes (with ``tok`` if given, else as ``cfg.tokenizer`` says) and splits what ``cfg`` describes.

    ``rows`` chooses the rows of each batch that this process needs; all processes count the same batches.
    Raises ValueError for files, text or sizes that do not fit, before a batch is made.
    """
    if cfg.task not in TASKS:
        return Data(**custom.load(cfg, tok, rows))
    return {"text": _text, "pairs": _pairs, "dates": _dates}[cfg.task](cfg, tok, rows)


def _text(cfg: DataConfig, tok: Tokenizer | None, rows: Rows) -> Data:
    documents = text.documents(cfg)
    tok = tok or _tokenizer(cfg, documents.train, documents.validation)
    ends = not documents.cut
    train, validation = (packing.encode(tok, side, eos=ends) for side in (documents.train, documents.validation))
    summary = {"vocab_size": tok.vocab_size}
    for name, side, stream in (("train", documents.train, train), ("validation", documents.validation, validation)):
        summary |= {
            f"{name}_documents": len(side),
            f"{name}_characters": sum(map(len, side)),
            f"{name}_tokens": len(stream.tokens),
        }
    held_out = packing.validation_batches(validation, cfg, tok.pad_id)

    def positions() -> dict[str, tuple[str, int]]:
        most = max((int(b["positions"].max()) + 1 if "positions" in b else cfg.length for b in held_out), default=0)
        training = packing.most_positions(train, cfg)
        return {"training rows": ("length", training), "validation rows": ("length", most)}

    return Data(
        tokenizer=tok,
        train=packing.train_batches(train, cfg, tok.pad_id, rows),
        validation=packing.validation_batches(validation, cfg, tok.pad_id, rows),
        validation_bytes=packing.target_bytes(held_out, tok),
        test_pairs=[],
        summary=summary,
        **_hashes(train=documents.train, validation=documents.validation),
        positions=positions,
    )


def _pairs(cfg: DataConfig, tok: Tokenizer | None, rows: Rows) -> Data:
    texts = pairs.read(cfg)
    tok = _with_ends(tok or _tokenizer(cfg, *map(_sides, texts[:2])))
    train, validation = (pairs.encode(tok, split, cfg) for split in (texts.train, texts.validation))
    return Data(
        tokenizer=tok,
        train=pairs.train_batches(train, cfg, tok, rows),
        validation=pairs.validation_batches(validation, cfg, tok, rows),
        validation_bytes=packing.target_bytes(pairs.validation_batches(validation, cfg, tok), tok),
        test_pairs=[texts.validation[i] for i in validation.kept],
        summary={
            "vocab_size": tok.vocab_size,
            "train_pairs": len(train.kept),
            "train_tokens": len(train.targets.tokens),
            "validation_pairs": len(validation.kept),
            "empty_pairs_skipped": texts.skipped,
            "long_pairs_dropped": train.dropped + validation.dropped,
        },
        positions=lambda: _pair_positions(cfg),
        **_hashes(train=_sides(texts.train), validation=_sides(texts.validation)),
    )


def _dates(cfg: DataConfig, tok: Tokenizer | None, rows: Rows) -> Data:
    train_dates, validation_dates, test_dates = dates.splits()
    sample = dates.distinct(train_dates, 10 * pairs.GENERATED)
    tok = _with_ends(tok or _tokenizer(cfg, _sides(sample), []))
    held, test = (dates.distinct(split, pairs.GENERATED) for split in (validation_dates, test_dates))
    checked = pairs.encode(tok, sample + held + test, cfg)
    if checked.dropped:
        sizes = f"source_length={cfg.source_length} and length={cfg.length}"
        raise ValueError(f"{sizes} are too short for the dates in this tokenizer; {checked.needed} are enough for all")
    validation = pairs.encode(tok, held, cfg)
    return Data(
        tokenizer=tok,
        train=pairs.date_batches(cfg, tok, rows),
        validation=pairs.validation_batches(validation, cfg, tok, rows),
        validation_bytes=packing.target_bytes(pairs.validation_batches(validation, cfg, tok), tok),
        test_pairs=test,
        summary={
            "vocab_size": tok.vocab_size,
            "train_dates": len(train_dates),
            "validation_pairs": len(held),
            "test_pairs": len(test),
        },
        positions=lambda: _pair_positions(cfg),
        **_hashes(dates=_sides(sample + held + test)),
    )


def _pair_positions(cfg: DataConfig) -> dict[str, tuple[str, int]]:
    return {"sources": ("source_length", cfg.source_length), "targets": ("length", cfg.length)}


def _sides(split: Sequence[pairs.Pair]) -> list[str]:
    return [side for pair in split for side in pair]


def _hashes(**texts: Sequence[str]) -> dict[str, Any]:
    """The fields of ``Data`` that hold hashes, of the texts of each split."""
    by_split = {name: key(split) for name, split in texts.items()}
    return {"content_hash": key(*by_split.values()), "split_hashes": by_split}


def _tokenizer(cfg: DataConfig, train: list[str], validation: list[str]) -> Tokenizer:
    if cfg.tokenizer not in tokenizers.KINDS:
        return tokenizers.load(cfg.tokenizer)
    # A table of characters learns nothing from a text, and without validation's rare ones that could not be encoded.
    texts = train + validation if cfg.tokenizer == "char" else train
    return tokenizers.train(cfg.tokenizer, texts, cfg.vocab_size)


def _with_ends(tok: Tokenizer) -> Tokenizer:
    for name in ("bos", "eos"):
        if getattr(tok, f"{name}_id") < 0:
            raise ValueError(f"pairs need a tokenizer with a {name} id, but this {tok.kind} tokenizer has none")
    return tok
