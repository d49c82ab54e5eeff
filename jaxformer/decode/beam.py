"""Beam search on the same forward and cache as sampling: num_beams hypotheses per prompt, best first."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.config import ModelConfig
from jaxformer.decode import loop
from jaxformer.decode.request import Inputs, Request, Search, Stopping, padded, positive, prepare, read_source
from jaxformer.decode.sampling import GREEDY
from jaxformer.nn import model
from jaxformer.nn.cache import Cache
from jaxformer.nn.mistakes import answers_mistakes

NEVER = -1e9  # worse than any score, and finite, so that differences of scores stay numbers


@struct.dataclass
class Beams:
    """The result of ``beam_search``: the n best hypotheses of each prompt, best first."""

    tokens: jax.Array
    """int32 [B, n, max_new_tokens]: what was generated; after an end token, padding."""
    scores: jax.Array
    """float32 [B, n]: sum of log-probabilities / length ** length_penalty."""
    lengths: jax.Array
    """int32 [B, n]: tokens generated, the end token included."""


@struct.dataclass
class _State:
    """The search between two steps: running hypotheses continue, finished ones wait to be beaten."""

    cache: Cache
    running: Beams
    finished: Beams
    open: Any
    """bool [B]: whether a running hypothesis may still become one of the best."""
    step: Any


@answers_mistakes
def beam_search(
    params: dict,
    prompts: Any,
    cfg: ModelConfig,
    *,
    max_new_tokens: int,
    num_beams: int = 4,
    num_return: int = 1,
    length_penalty: float = 1.0,
    early_stopping: Stopping = False,
    eos: int | Sequence[int] | None = None,
    banned: Sequence[int] = (),
    pad: int = 0,
    valid: Any = None,
    source: Any = None,
    source_valid: Any = None,
    prefill_chunk: int = 512,
    cache_dtype: Any = None,
) -> Beams:
    """The ``num_return`` best of ``num_beams`` hypotheses for each prompt. All other arguments are those of ``generate``.

    A hypothesis scores the sum of its log-probabilities / (tokens, the end token included) ** length_penalty. It is finished
    by an end token, or by ``max_new_tokens``. A row's search ends, by early_stopping: True, as soon as there are num_beams
    finished ones; False, as soon as the best running one, at its present length, scores no better than the worst finished one;
    "never", as soon as it could not at any length, if its further tokens had probability 1.

    banned: ids that are never chosen, such as ``range(tok.vocab_size, cfg.vocab_size)``, which the tokenizer does not have; the
    probabilities of the others stay what they are.

    Raises ValueError as ``generate`` does, and for a num_return above num_beams.
    """
    for name, number in (("num_beams", num_beams), ("num_return", num_return)):
        positive(name, number)
    if num_return > num_beams:
        raise ValueError(f"num_return={num_return} is more than num_beams={num_beams}")
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise ValueError(f"early_stopping={early_stopping!r} must be True, False or 'never'")
    if isinstance(length_penalty, bool) or not isinstance(length_penalty, int | float) or not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty={length_penalty!r} must be a finite number")
    ids, lengths = padded(prompts, valid, cfg, source)
    request, inputs = prepare(
        params,
        cfg,
        ids,
        lengths,
        read_source(source, source_valid, len(ids), cfg),
        max_new_tokens=max_new_tokens,
        sampling=replace(GREEDY, banned=tuple(banned)),
        eos=eos,
        pad=pad,
        num_return=num_beams,
        prefill_chunk=prefill_chunk,
        cache_dtype=cache_dtype,
        search=Search(float(length_penalty), early_stopping),
    )
    if num_beams + len(request.eos) > cfg.vocab_size - len(set(banned)):
        choices = f"a vocabulary of {cfg.vocab_size}, of which {len(set(banned))} are banned"
        raise ValueError(f"num_beams={num_beams} and {len(request.eos)} end ids are too many for {choices}")
    best = _search(params, inputs, request=request)
    return jax.tree.map(lambda x: x[:, :num_return], best)


@functools.partial(jax.jit, static_argnames="request")
def _search(params, inputs: Inputs, *, request: Request) -> Beams:
    params = model.unstack(params, request.cfg)
    batch, n = len(inputs.prompts), request.copies
    last_BD, cache, _ = loop.read(params, inputs, request)
    tokens = jnp.full((batch, n, request.max_new_tokens), request.pad, jnp.int32)
    none = Beams(tokens, jnp.full((batch, n), NEVER, jnp.float32), jnp.zeros((batch, n), jnp.int32))
    # All beams of a row start as the same hypothesis: only the first may continue, or all would choose the same tokens.
    running = none.replace(scores=none.scores.at[:, 0].set(0.0))  # type: ignore[attr-defined]
    state = _State(cache, running, none, jnp.ones(batch, bool), jnp.zeros((), jnp.int32))
    state = _extend(params, last_BD, state, inputs.values, request)

    def step(state: _State) -> _State:
        token = jnp.take_along_axis(state.running.tokens, (state.running.lengths - 1)[..., None], axis=-1).reshape(-1, 1)
        hidden_BTD, cache, _ = model.apply(params, token, request.cfg, cache=state.cache)
        return _extend(params, hidden_BTD[:, 0], state.replace(cache=cache), inputs.values, request)  # type: ignore[attr-defined]

    return jax.lax.while_loop(lambda state: (state.step < request.max_new_tokens) & state.open.any(), step, state).finished


def _extend(params, last_BD, state: _State, values: dict, request: Request) -> _State:
    """One more token for the running hypotheses."""
    candidates, parents = _candidates(params, last_BD, state, values, request)
    tokens = jnp.take_along_axis(candidates.tokens, (candidates.lengths - 1)[..., None], axis=-1)[..., 0]
    ended = (state.step + 1 >= request.max_new_tokens) | jnp.isin(tokens, jnp.array(request.eos, jnp.int32))
    finished = _finished(candidates, ended, state, request)
    order = jax.lax.top_k(jnp.where(ended, NEVER, candidates.scores), request.copies)[1]
    running = _pick(candidates, order)
    parents = jnp.take_along_axis(parents, order, axis=1)
    batch = len(parents)
    row = (jnp.arange(batch)[:, None] * request.copies + parents).reshape(-1)
    open_ = state.open & _improvable(running, finished, state.step + 1, request)
    return _State(state.cache.take(row, source=False), running, finished, open_, state.step + 1)


def _candidates(params, last_BD, state: _State, values: dict, request: Request) -> tuple[Beams, jax.Array]:
    """The best continuations of a row's beams, as many as leave n that go on even if each end token has been chosen for each
    beam; and which beam each continues."""
    n = request.copies
    logp = jax.nn.log_softmax(model.head(params, last_BD[:, None], request.cfg)[:, 0])
    if "bias" in request.methods.names:
        logp = logp + values["bias"]  # −inf for the banned
    vocab = logp.shape[-1]
    total = (logp.reshape(-1, n, vocab) + state.running.scores[..., None]).reshape(-1, n * vocab)
    scores, flat = jax.lax.top_k(total, n * max(2, 1 + len(request.eos)))
    parents = flat // vocab
    before = _pick(state.running, parents)
    at = jnp.arange(request.max_new_tokens) == before.lengths[..., None]
    tokens = jnp.where(at, (flat % vocab)[..., None], before.tokens)
    return Beams(tokens, scores, before.lengths + 1), parents


def _finished(candidates: Beams, ended, state: _State, request: Request) -> Beams:
    """The best n finished hypotheses, with those among the best n candidates that have just ended."""
    search = request.search
    assert search is not None
    scores = candidates.scores / (state.step + 1).astype(jnp.float32) ** search.length_penalty
    full = (state.finished.scores > NEVER).all(1) if search.early_stopping is True else jnp.zeros(len(ended), bool)
    counts = ended & (jnp.arange(ended.shape[1]) < request.copies) & (state.open & ~full)[:, None]
    new = Beams(candidates.tokens, jnp.where(counts, scores, NEVER), candidates.lengths)
    both = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), state.finished, new)
    return _pick(both, jax.lax.top_k(both.scores, request.copies)[1])


def _improvable(running: Beams, finished: Beams, length, request: Request) -> jax.Array:
    """[B]: whether the best running hypothesis may still beat the worst finished one (or there are fewer than n of those)."""
    search, full = request.search, (finished.scores > NEVER).all(1)
    assert search is not None
    if search.early_stopping is True:
        return ~full
    longest = search.early_stopping == "never" and search.length_penalty > 0
    at_length = request.max_new_tokens if longest else length.astype(jnp.float32)
    best = running.scores[:, 0] / at_length**search.length_penalty
    return ~full | (best > finished.scores.min(1))


def _pick(hypotheses: Beams, order: jax.Array) -> Beams:
    """The hypotheses of each row that ``order`` [B, m] names."""

    def pick(x):
        return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)

    return jax.tree.map(pick, hypotheses)
