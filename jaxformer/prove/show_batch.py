"""A training batch as text: what the model reads of a few rows, where documents begin, and which targets count."""

from collections.abc import Iterator

import numpy as np
from rich.text import Text

from jaxformer.data import Batch
from jaxformer.tokenizers.tokenizer import Tokenizer

ROWS = 2
SEGMENTS = 3
"""Segments of a row that are shown."""
CHARACTERS = 90
"""Characters that are shown of a segment."""
COLORS = ("cyan", "green", "magenta")


def shown(batch: Batch, tok: Tokenizer) -> Iterator[Text]:
    """Lines for the rows with the most segments; each segment has a color, and one without a target that counts is dimmed. A
    batch that is not of tokens, targets and weights is shown by the shapes of its entries."""
    if not {"tokens", "targets", "weights"} <= batch.keys():
        yield Text(", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in batch.items()), style="dim")
        return
    tokens, counted = np.asarray(batch["tokens"]), np.asarray(batch["weights"]) != 0
    segments = np.asarray(batch.get("segments", np.ones_like(tokens)))
    for row in sorted(range(len(tokens)), key=lambda row: -len(np.unique(segments[row])))[:ROWS]:
        spans = np.split(np.arange(tokens.shape[1]), np.flatnonzero(np.diff(segments[row])) + 1)
        sizes = " + ".join(str(len(span)) for span in spans)
        where = _ranges(np.flatnonzero(~counted[row]))
        yield Text(
            f"row {row}: segments of {sizes} tokens, {counted[row].sum()} of {tokens.shape[1]} targets count"
            + (f", not at {where}" if where else ""),
            style="bold",
        )
        if "source" in batch:
            source = np.asarray(batch["source"][row])
            yield _line("source", source[np.asarray(batch.get("source_valid", np.ones_like(batch["source"]))[row], bool)], tok)
            yield _line("target", np.asarray(batch["targets"])[row, counted[row]], tok, COLORS[1])
            continue
        for number, span in enumerate(spans[:SEGMENTS]):
            style = COLORS[number % len(COLORS)] if counted[row, span].any() else "dim"
            yield _line(str(segments[row, span[0]]), tokens[row, span], tok, style)


def _line(label: str, ids: np.ndarray, tok: Tokenizer, style: str = COLORS[0]) -> Text:
    """The beginning and the end of a text, on one line; ids where they are no text."""
    try:
        text = tok.decode(ids)
    except ValueError:
        text = " ".join(map(str, ids))
    text = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    text = text if len(text) <= CHARACTERS else f"{text[: CHARACTERS - 25]} … {text[-22:]}"
    return Text.assemble((f"{label:>8}  ", "dim"), (text, style))


def _ranges(indices: np.ndarray) -> str:
    """Ascending numbers as ranges, the first few: "3, 7–9"."""
    if not len(indices):
        return ""
    runs = np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1)
    texts = [f"{run[0]}" if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return ", ".join(texts[:4]) + (", …" if len(texts) > 4 else "")
