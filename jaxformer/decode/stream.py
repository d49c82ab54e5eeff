"""Text as it is generated: whole characters only, stop strings, several rows at a time."""

import functools
import os.path
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.decode import loop
from jaxformer.decode.request import Inputs, Request, padded, positive, prepare, read_source
from jaxformer.decode.sampling import GREEDY, Sampling, only_below
from jaxformer.nn import model, stack
from jaxformer.nn.mistakes import answers_mistakes

_UNFINISHED = "\ufffd"  # what the bytes of an incomplete character decode to


class Piece(NamedTuple):
    """A row's next text. Joined, a row's pieces are its output, up to its end token or stop string."""

    row: int
    text: str
    finish: str = ""
    """Why the row has ended, in its last piece: "eos", "stop" or "length"."""
    tokens: tuple[int, ...] = ()
    """The tokens generated since the row's last piece, with those of a stop string and the end token."""


@answers_mistakes
def stream(
    params: dict,
    prompts: Any,
    cfg: ModelConfig,
    tok: Any,
    *,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    sampling: Sampling | Sequence[Sampling] | Mapping[str, Any] = GREEDY,
    key: jax.Array | None = None,
    eos: int | Sequence[int] | None = None,
    valid: Any = None,
    source: Any = None,
    source_valid: Any = None,
    num_return: int | None = None,
    prefill_chunk: int = 512,
    cache_dtype: Any = None,
    block: int = 4,
) -> Iterator[Piece]:
    """Yields the text of ``generate``, whose arguments it takes, in ``Piece``s as it is generated; row r·num_return + n is the
    n-th of prompt r. tok: the tokenizer that decodes; ids that it does not have are not chosen. stop: texts that end a row
    where one appears, without it. eos: the tokenizer's unless given. block: tokens computed between two looks at the output.

    Raises ValueError for anything wrong before the first piece is asked for, and FloatingPointError where no token is left to
    choose.
    """
    positive("block", block)
    if isinstance(stop, str):
        raise ValueError(f"stop={stop!r} must be a list of strings, such as [{stop!r}]")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop={tuple(stop)!r} must contain only non-empty strings")
    ids, lengths = padded(prompts, valid, cfg, source)
    request, inputs = prepare(
        params,
        cfg,
        ids,
        lengths,
        read_source(source, source_valid, len(ids), cfg),
        max_new_tokens=max_new_tokens,
        sampling=only_below(sampling, tok.vocab_size, cfg.vocab_size),
        key=key,
        eos=tok.eos_id if eos is None and tok.eos_id >= 0 else eos,
        pad=max(tok.pad_id, 0),
        num_return=num_return,
        prefill_chunk=prefill_chunk,
        cache_dtype=cache_dtype,
    )
    before = [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]
    if prompts is None:  # the start token is not text
        before = [[]] * len(before)
    rows = [_Row(tok, text, stop) for text in before for _ in range(request.copies)]
    return _stream(params, inputs, request, rows, block)


def _stream(params, inputs: Inputs, request: Request, rows: list["_Row"], block: int) -> Iterator[Piece]:
    if not stack.is_unstacked(params["decoder"]["layers"]):
        params = _unstack(params, request.cfg)
    state, emitted = _start(params, inputs, request=request)
    emitted = jax.tree.map(lambda x: x[None], emitted)
    ended = np.zeros(len(rows), bool)
    while not ended.all():
        tokens, alive, done = (np.asarray(x) for x in (emitted.token, emitted.alive, state.done))
        if np.isnan(np.asarray(emitted.logprob)).any():
            raise FloatingPointError(
                "there is no token to choose: the logits are NaN or −inf, as the model or the sampling options made them"
            )
        if not (done | ended).all():  # computed while the text of the last block is put together
            state, emitted = _block(params, state, inputs.values, ended.copy(), request=request, steps=block)
        for number, row in enumerate(rows):
            if not ended[number]:
                piece = row.feed(number, tokens[alive[:, number], number].tolist(), bool(done[number]), request.eos)
                ended[number] = bool(piece.finish)
                if piece.text or piece.finish:
                    yield piece


class _Row:
    """Makes one row's tokens into pieces."""

    def __init__(self, tok: Any, before: Sequence[int], stop: Sequence[str]):
        self._decoder, self._stop = Decoder(tok, before), Stop(stop)
        self._tokens: list[int] = []

    def feed(self, number: int, new: list[int], done: bool, eos: tuple[int, ...]) -> Piece:
        text, finish = "", ""
        for at, token in enumerate(new):
            last = done and at == len(new) - 1
            self._tokens.append(token)
            more, stopped = self._stop.feed(self._decoder.add([] if token in eos else [token], last=last), last=last)
            text += more
            if stopped or last:
                finish = "stop" if stopped else "eos" if token in eos else "length"
                break
        tokens = tuple(self._tokens)
        if text or finish:
            self._tokens = []
        return Piece(number, text, finish, tokens)


@functools.partial(jax.jit, static_argnums=1)
def _unstack(params, cfg):
    return model.unstack(params, cfg)


@functools.partial(jax.jit, static_argnames="request")
def _start(params, inputs, *, request):
    return loop.start(params, inputs, request)


@functools.partial(jax.jit, static_argnames=("request", "steps"))
def _block(params, state, values, ended, *, request, steps):
    state = state.replace(done=state.done | ended)
    return loop.block(params, state, values, request, steps)


class Decoder:
    """Tokens to text, one after another: text that has been returned is never taken back, and joined it is the text of all
    tokens. An id that the tokenizer does not have (models may have more ids) is U+FFFD.

    before: tokens that stand before the text; a first word's space, or the rest of a character, depends on them.
    """

    def __init__(self, tok: Any, before: Sequence[int] = ()):
        self._tok, self._ids = tok, list(before[-8:])
        self._start, self._sent = 0, len(self._ids)

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """The text that is now certain; with ``last``, all of it."""
        if any(token >= self._tok.vocab_size for token in tokens):
            pieces = [self._unknown(token) if token >= self._tok.vocab_size else self.add([token]) for token in tokens]
            return "".join(pieces)
        self._ids += tokens
        known = self._tok.decode(self._ids[self._start : self._sent])
        text = self._tok.decode(self._ids[self._start :])
        if text.endswith(_UNFINISHED) and not last:
            return ""
        new = text[len(os.path.commonprefix([known, text])) :]
        if new:  # the next text is compared with what was sent last: decoding everything again would take ever longer
            self._start, self._sent = self._sent, len(self._ids)
        return new

    def _unknown(self, token: int) -> str:
        text = self.add([], last=True)
        self._ids, self._start, self._sent = [], 0, 0
        return text + _UNFINISHED


class Stop:
    """Holds back text that may begin a stop string. Of several stop strings in a text, the one that begins first counts."""

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held = tuple(stops), ""

    def feed(self, text: str, last: bool = False) -> tuple[str, bool]:
        """The text that no stop string can begin in, and whether one has appeared (the text then ends before it)."""
        text = self._held + text
        begin = min((at for at in (text.find(stop) for stop in self._stops) if at >= 0), default=len(text) + 1)
        keep = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        if begin <= len(text) - keep:  # else a longer one may have begun before it
            self._held = ""
            return text[:begin], True
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``, and is not all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
