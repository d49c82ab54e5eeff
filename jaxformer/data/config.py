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
    """What to learn from: text, one stream for a language model; pairs, parallel text for an encoder–decoder; dates,
    generated pairs; or 'package.module:name' of a function of this DataConfig that returns a data set (see
    jaxformer.data.custom)."""
    path: str | None = None
    """File, folder or glob of UTF-8 text or JSON lines (.jsonl, field "text"), or a URL (gs://, s3://, https://), whose files
    are copied into the cache; none: the source code of the running Python's standard library. For pairs: a TSV (source,
    tab, target), or the source side with target_path."""
    validation_path: str | None = None
    """Validation text, given like path (for pairs: a TSV); none: held out of path by validation_fraction."""
    target_path: str | None = None
    """File with the target side of parallel text; line i is the translation of line i of path."""
    tokenizer: str = "bpe"
    """bpe or unigram (SentencePiece, trained on the training split), char, byte, or the path of a saved tokenizer or
    SentencePiece .model."""
    vocab_size: int = 4096
    """Number of pieces of a SentencePiece tokenizer (bpe, unigram) that the run trains."""
    length: int = 256
    """[T] Number of tokens per row (for pairs, of the target)."""
    source_length: int = 64
    """[S] Number of tokens of an encoder–decoder's source."""
    batch_size: int = 16
    """[B] Number of rows per step, over all devices."""
    validation_fraction: float = 0.1
    """Share held out: whole files, by a hash of their path; a single file's end; pairs, by a hash of the source."""
    validation_rows: int = 0
    """Maximum number of rows to validate on, spread evenly over the split. 0: all of it."""
    seed: int = 0
    """Seed of the order of training rows and of where they begin in the text."""
    segment_documents: bool = True
    """Keep the documents packed into a row apart: no attention and no loss across a border, and positions that restart.
    Otherwise a row is one stream of text."""
    accept_change: bool = False
    """Continue a run although its text has changed since the run began."""

    def __post_init__(self):
        super().__post_init__()
        if self.task not in TASKS and ":" not in self.task:
            raise ValueError(f"unknown data.task {self.task!r}{nearest(self.task, TASKS)} (or give 'package.module:name')")
        within(self, 1, math.inf, "vocab_size", "length", "source_length", "batch_size")
        within(self, 0, math.inf, "validation_rows")
        within(self, 0, 2**32, "seed")
        within(self, 0, 1, "validation_fraction")
        if not self.tokenizer:
            raise ValueError("data.tokenizer is empty; it must be bpe, unigram, char, byte or a path")
        if self.target_path and self.task != "pairs":
            raise ValueError(f"data.target_path has no effect with data.task={self.task!r}; set data.task='pairs'")
        if self.task == "dates" and (self.path or self.validation_path):
            raise ValueError("data.task='dates' generates its data and reads no path; use data.task='pairs' for a file")
