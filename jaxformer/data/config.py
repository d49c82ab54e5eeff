"""The record of a run's data."""

import math
from dataclasses import dataclass

from jaxformer.config.components import nearest
from jaxformer.config.strict import Strict, within

TASKS = ("text", "pairs", "dates")
"""Names of the library's own data sets."""


@dataclass(frozen=True)
class DataConfig(Strict):
    """Where text comes from and how it becomes batches. Letters in brackets are the dimension key's.

    Raises ValueError, naming the field, for values that describe no data set.
    """

    FORMER = {"separate": "segment_documents"}
    NAMES = {"task": TASKS}

    task: str = "text"
    """text, one stream for a language model; pairs, parallel text for an encoder–decoder; dates, generated pairs; or
    'package.module:name' of a function of this DataConfig that returns a data set (see jaxformer.data.custom)."""
    path: str | None = None
    """File, folder or glob of UTF-8 text or JSON lines (.jsonl, field "text"), or a URL (gs://, s3://, https://), whose files
    are copied into the cache; none: the source code of the running Python's standard library. For pairs: a TSV (source,
    tab, target), or the source side with target_path."""
    validation_path: str | None = None
    """Validation text, given like path (for pairs: a TSV); none: held out of path by validation_fraction."""
    target_path: str | None = None
    """Target side of parallel text, line by line with path."""
    tokenizer: str = "bpe"
    """bpe or unigram (SentencePiece, trained on the training split), char, byte, or the path of a saved tokenizer or
    SentencePiece .model."""
    vocab_size: int = 4096
    """Pieces of a SentencePiece tokenizer that is trained here."""
    length: int = 256
    """[T] tokens per row (of the target, for pairs)."""
    source_length: int = 64
    """[S] tokens of an encoder–decoder's source."""
    batch_size: int = 16
    """[B] rows per step, over all devices."""
    validation_fraction: float = 0.1
    """Share held out: whole files, by a hash of their path; a single file's end; pairs, by a hash of the source."""
    validation_rows: int = 0
    """Most rows to validate on, spread evenly over the split; 0 is all of it."""
    seed: int = 0
    """Seed of the order and of the offsets of training rows."""
    segment_documents: bool = True
    """Keep packed documents apart: segments, positions that restart, no loss across a border. Otherwise one stream."""
    accept_change: bool = False
    """Continue a run although its text is no longer the one that it has been trained on."""

    def __post_init__(self):
        super().__post_init__()
        if self.task not in TASKS and ":" not in self.task:
            raise ValueError(f"unknown task {self.task!r}{nearest(self.task, TASKS)} (or give 'package.module:name')")
        within(self, 1, math.inf, "vocab_size", "length", "source_length", "batch_size")
        within(self, 0, math.inf, "validation_rows")
        within(self, 0, 2**32, "seed")
        within(self, 0, 1, "validation_fraction")
        if not self.tokenizer:
            raise ValueError("tokenizer='' must be bpe, unigram, char, byte or a path")
        if self.target_path and self.task != "pairs":
            raise ValueError(f"target_path has no use in task={self.task!r}; set task='pairs'")
        if self.task == "dates" and (self.path or self.validation_path):
            raise ValueError("task='dates' is generated and reads no path; use task='pairs' for a file")
