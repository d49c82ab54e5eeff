"""Whether tokenizer, vocabulary and text agree: the ids of the first batches against the model's vocabulary, the end token, and
how much of a batch is trained."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxformer.data import Batch, Data
from jaxformer.data.config import TASKS
from jaxformer.prove.findings import FAILED, OK, WARNING, Finding
from jaxformer.prove.settings import SPARE_IDS
from jaxformer.training import run
from jaxformer.training.objective import IGNORE

SEARCHED, SECONDS = 64, 3.0
"""Batches in which an end token is looked for, and for how long."""
LEAST = 0.2
"""Share of a batch's targets below which much of the computation is for padding."""


def findings(config: run.Config, corpus: Data, batch: Batch) -> Iterator[Finding]:
    """The checks that need data and tokenizer. batch: the first one."""
    yield _amount(config, corpus)
    yield _vocabulary(config, corpus)
    if {"tokens", "targets", "weights"} <= batch.keys():
        yield _ids(config, corpus, batch)
        yield _weights(config, batch)
        if config.data.task in TASKS:
            yield _ends(config, corpus, batch)
    if config.train.sample_tokens and not config.model.encoder_layers:
        yield _prompt(config, corpus)


def _amount(config: run.Config, corpus: Data) -> Finding:
    data, read = config.data, corpus.summary.get("train_tokens", 0)
    rows = data.batch_size * data.length
    if not read:
        return Finding(OK, "data", ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in corpus.summary.items()) or "read")
    said = (
        f"{read:,} tokens to train on; train.steps={config.train.steps} reads them {config.train.steps * rows / read:.2g} times"
    )
    if data.task == "text" and rows > read:
        return Finding(WARNING, "data", f"{said}: this is less than one batch of {data.batch_size} × {data.length}")
    if not len(corpus.validation):
        return Finding(WARNING, "data", f"{said}; there is no text to validate on")
    return Finding(OK, "data", said)


def _vocabulary(config: run.Config, corpus: Data) -> Finding:
    tok, size = corpus.tokenizer, config.model.vocab_size
    special = {name: getattr(tok, f"{name}_id") for name in ("pad", "bos", "eos")}
    outside = [f"{name} {i}" for name, i in special.items() if i >= tok.vocab_size]
    said = f"{tok.kind} tokenizer with {tok.vocab_size:,} ids, model.vocab_size={size:,}"
    if outside:
        return Finding(FAILED, "vocabulary", f"{said}: its ids of {' and '.join(outside)} are outside its vocabulary")
    if size > tok.vocab_size + SPARE_IDS:
        return Finding(WARNING, "vocabulary", f"{said}: {size - tok.vocab_size:,} rows of the embedding are never used")
    grown = f", which grows to {tok.vocab_size:,}" if size < tok.vocab_size else ""
    return Finding(OK, "vocabulary", said + grown)


def _ids(config: run.Config, corpus: Data, batch: Batch) -> Finding:
    vocabulary = max(config.model.vocab_size, corpus.tokenizer.vocab_size)
    targets = np.asarray(batch["targets"])
    trained = targets[(np.asarray(batch["weights"]) != 0) & (targets != IGNORE)]
    ids = {name: np.asarray(batch[name]).ravel() for name in ("tokens", "source") if name in batch} | {"targets": trained}
    for name, values in ids.items():
        wrong = values[(values < 0) | (values >= vocabulary)]
        if len(wrong):
            return Finding(FAILED, "ids", f"{name} contain {wrong[0]}, which is outside the vocabulary of {vocabulary:,}")
    if "source" not in ids and config.model.causal and np.array_equal(batch["targets"], batch["tokens"]):
        return Finding(
            FAILED, "ids", "the targets are the tokens themselves, not the token after each: the model would only learn to copy"
        )
    distinct = len(np.unique(np.concatenate(list(ids.values()))))
    return Finding(OK, "ids", f"all ids of the first batch are in the vocabulary; {distinct:,} are distinct")


def _weights(config: run.Config, batch: Batch) -> Finding:
    counted = np.asarray(batch["weights"]) != 0
    share, rows = counted.mean(), (~counted.any(1)).sum()
    said = f"{share:.1%} of the targets of the first batch count"
    if not counted.any():
        return Finding(FAILED, "weights", "no target of the first batch has any weight, so there is nothing to learn from")
    if rows:
        return Finding(WARNING, "weights", f"{said}, but none in {rows} of the rows")
    if share < LEAST:
        return Finding(WARNING, "weights", f"{said}, so most of the computation is spent on padding; lower data.length")
    return Finding(OK, "weights", said)


def _ends(config: run.Config, corpus: Data, batch: Batch) -> Finding:
    """Without an end in what is trained, a model never learns to stop."""
    eos, task = corpus.tokenizer.eos_id, config.data.task
    if eos < 0:
        return Finding(
            WARNING, "end of text", f"this {corpus.tokenizer.kind} tokenizer has no eos id, so generated text never ends"
        )
    if task != "text":
        rows = _trained_ends(batch, eos).any(1)
        missing = int((~rows).sum())
        why = f"the targets of {missing} rows do not end with eos {eos}" if missing else f"every target ends with eos {eos}"
        return Finding(WARNING if missing else OK, "end of text", why)
    if not config.data.segment_documents:
        return Finding(OK, "end of text", "data.segment_documents=False: documents are read as one stream")
    read, began = 0, time.perf_counter()
    for number in range(SEARCHED):
        batch = corpus.train[number]
        read += batch["targets"].size
        if count := int(_trained_ends(batch, eos).sum()):
            return Finding(OK, "end of text", f"eos {eos} is among the targets ({count} in batch {number + 1})")
        if time.perf_counter() - began > SECONDS:
            break
    why = f"eos {eos} is not among {read:,} targets, so the model will not learn to end a text (is the text one document?)"
    return Finding(WARNING, "end of text", why)


def _trained_ends(batch: Batch, eos: int) -> Any:
    return (np.asarray(batch["targets"]) == eos) & (np.asarray(batch["weights"]) != 0)


def _prompt(config: run.Config, corpus: Data) -> Finding:
    prompt = config.train.prompt
    try:
        ids = corpus.tokenizer.encode(prompt)
    except ValueError as error:
        return Finding(FAILED, "prompt", f"train.prompt={prompt!r}: {error}")
    return Finding(OK, "prompt", f"train.prompt={prompt!r} is {len(ids)} tokens")
