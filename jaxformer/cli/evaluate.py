"""How well a model predicts text: ``jaxformer evaluate RUN FILE ...``.

Every token of each file is scored exactly once, given the tokens before it: the first one after the token that begins a
document. A file that is longer than the context is read in windows; each begins STRIDE tokens after the one before it and
scores the tokens that the earlier ones have not, each of which sees at least LENGTH - STRIDE tokens.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro

from jaxformer.cli import accelerators, pretrained, program_cache
from jaxformer.config import ModelConfig
from jaxformer.config.strict import Strict, within
from jaxformer.config.textfile import read_text
from jaxformer.nn.logprobs import logprobs
from jaxformer.parallel import exit_codes

LONGEST = 1024
"""Tokens of the context unless --length is given or the model's max_length is less."""


@dataclass(frozen=True)
class Options(Strict):
    """What to load and what to score."""

    run: Annotated[str | Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run directory that train.py wrote, a Hugging Face folder with its tokenizer, or a Hugging Face Hub id."""
    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE [FILE ...]")]
    """UTF-8 text files; each is scored on its own, as one document."""
    length: int | None = None
    """Number of tokens per window. Default: the model's max_length, at most 1024."""
    stride: int | None = None
    """Tokens from the start of one window to that of the next, below the length. Default: half the length. The smaller it is,
    the more context a token has, and the longer it takes."""
    batch_size: int = 8
    """Number of windows that are scored together."""
    json: bool = False
    """Print JSON instead of a table."""
    trust: bool = dataclasses.field(default=False, repr=False)
    """Follow the import paths in the config.json of a run with its own components, which runs their code; also accept a
    config.json that has been edited."""

    def __post_init__(self):
        super().__post_init__()
        within(self, 2, math.inf, "length")
        within(self, 1, math.inf, "stride", "batch_size")
        if not self.files:
            raise ValueError("give at least one text file to score")


@dataclass(frozen=True)
class Score:
    """Of a file: its tokens and bytes, and the negative log-likelihood of all its tokens together, in nats."""

    tokens: int
    bytes: int
    nll: float

    def values(self) -> dict[str, float]:
        """Loss (nats per token), perplexity, bits per byte, and the counts."""
        loss = self.nll / self.tokens
        perplexity = math.exp(loss) if loss < 700 else math.inf
        bits = self.nll / math.log(2) / self.bytes
        return {"tokens": self.tokens, "bytes": self.bytes, "loss": loss, "perplexity": perplexity, "bits_per_byte": bits}


def windows(count: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """``(start, first, end)`` of each window [start, end) over ids 0 to count - 1: it scores the ids from first to end - 1.
    Together they score each id but the first, once."""
    start, first = 0, 1
    while first < count:
        end = min(start + length, count)
        yield start, first, end
        start, first = start + stride, end


def score(params: Any, cfg: ModelConfig, ids: Sequence[int], length: int, stride: int, batch_size: int = 8) -> np.ndarray:
    """The log-probability in nats of each of ``ids``, float32 [len(ids)], 0 for the first; in windows of at most ``length``
    tokens."""
    every, run = np.asarray(ids, np.int32), jax.jit(logprobs)
    logprobs_T, parts = np.zeros(len(ids), np.float32), list(windows(len(ids), length, stride))
    width = min(length, len(ids))
    for begin in range(0, len(parts), batch_size):
        rows = parts[begin : begin + batch_size]
        tokens, valid = np.zeros((batch_size, width), np.int32), np.zeros((batch_size, width), bool)
        for row, (start, _, end) in enumerate(rows):
            tokens[row, : end - start], valid[row, : end - start] = every[start:end], True
        scored = np.asarray(run(params, tokens, cfg, valid=valid))
        for row, (start, first, end) in enumerate(rows):
            logprobs_T[first:end] = scored[row, first - start : end - start]
    return logprobs_T


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    description = exit_codes.below(__doc__)
    options = tyro.cli(Options, args=arguments, prog="jaxformer evaluate", description=description)
    program_cache.enable()
    accelerators.keep_memory()
    texts = {str(path): _read(path) for path in options.files}
    cfg, params, tok = pretrained.load(options.run, options.trust)
    if cfg.encoder_layers or not cfg.causal:
        raise ValueError(f"{options.run} is not a causal decoder; only those assign a probability to text")
    length, stride = _sizes(options, cfg)
    begins = next(i for i in (tok.bos_id, tok.eos_id, tok.pad_id, 0) if i >= 0)
    scores = {}
    for name, text in texts.items():
        ids = [begins, *tok.encode(text)]
        each = score(params, cfg, ids, length, stride, options.batch_size)
        scores[name] = Score(len(ids) - 1, len(text.encode()), -float(each.sum(dtype=np.float64)))
    if len(scores) > 1:
        sums = (sum(getattr(score, field.name) for score in scores.values()) for field in dataclasses.fields(Score))
        scores["all files"] = Score(*sums)
    show({name: score.values() for name, score in scores.items()}, length, stride, options.json)


def _read(path: Path) -> str:
    """The text of a file. Raises ValueError where it is not UTF-8 or has none."""
    try:
        text = read_text(os.path.expanduser(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    if not text:
        raise ValueError(f"{path} is empty: there is nothing to score")
    return text


def _sizes(options: Options, cfg: ModelConfig) -> tuple[int, int]:
    """The length and stride of the windows. Raises ValueError where they do not fit the model or each other."""
    length = min(cfg.max_length, LONGEST) if options.length is None else options.length
    if length > cfg.max_length:
        raise ValueError(f"--length {length} is more than the model's max_length, {cfg.max_length}")
    stride = max(1, length // 2) if options.stride is None else options.stride
    if stride >= length:
        raise ValueError(f"--stride {stride} must be below the length of a window, {length}, so that every token has context")
    return length, stride


def show(values: dict[str, dict[str, float]], length: int, stride: int, as_json: bool) -> None:
    """Prints the scores of the files."""
    from rich.console import Console
    from rich.table import Table

    if as_json:
        print(json.dumps({"length": length, "stride": stride, "files": values}, indent=2))
        return
    table = Table(caption=f"windows of {length} tokens, {stride} apart; loss in nats per token", caption_justify="left")
    table.add_column("file", overflow="fold")
    for title in ("tokens", "bytes", "loss", "perplexity", "bits per byte"):
        table.add_column(title, justify="right")
    for name, row in values.items():
        numbers = [f"{row[key]:,}" for key in ("tokens", "bytes")]
        table.add_row(name, *numbers, *(f"{row[key]:.4f}" for key in ("loss", "perplexity", "bits_per_byte")))
    Console(markup=False, highlight=False).print(table)
