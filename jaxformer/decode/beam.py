"""Beam search on the same forward and cache as sampling: num_beams hypotheses a row, best first."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.config import ModelConfig
from jaxformer.decode import loop
from jaxformer.decode import prompts as starts
from jaxformer.nn import model
from jaxformer.nn.cache import Cache
from jaxformer.nn.cache_spec import empty, spec

NEVER = -1e9  # worse than any score, and finite, so that differences of scores stay numbers

Stopping = Literal["never"] | bool


@struct.dataclass
class Beams:
    """What ``beam_search`` gives: n hypotheses a row, best first."""

    tokens: jax.Array
    """int32 [B, n, max_new_tokens]: what was generated; after an end token, padding."""
    scores: jax.Array
    """float32 [B, n]: sum of log-probabilities / length ** length_penalty."""
    lengths: jax.Array
    """int32 [B, n]: tokens generated, the end token included."""


@dataclass(frozen=True)
class _Plan:
    cfg: ModelConfig
    beams: int
    max_new_tokens: int
    eos: tuple[int, ...]
    pad: int
    slots: int
    chunk: int
    length_penalty: float
    early_stopping: Stopping
    cache_dtype: str | None


@struct.dataclass
class _Hypotheses:
    """[B, n, …]: tokens, length and score of each."""

    tokens: Any
    lengths: Any
    scores: Any


@struct.dataclass
class _State:
    """One step's search: running hypotheses continue, finished ones wait to be beaten."""

    cache: Cache
    running: _Hypotheses
    finished: _Hypotheses
    open: Any
    """bool [B]: whether a running hypothesis may still become one of the best."""
    step: Any


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
    eos: int | Sequence[int] = (),
    pad: int = 0,
    valid: Any = None,
    source: Any = None,
    source_valid: Any = None,
    prefill_chunk: int = 512,
    cache_dtype: Any = None,
) -> Beams:
    """The ``num_return`` best of ``num_beams`` hypotheses for each prompt; prompts, source, eos and pad as in ``generate``.

    A hypothesis scores the sum of its log-probabilities / (tokens, the end token included) ** length_penalty. It is finished
    by an end token, or by ``max_new_tokens``. A row's search ends, by early_stopping: True, as soon as there are num_beams
    finished ones; False, as soon as the best running one, at its present length, scores no better than the worst finished one;
    "never", as soon as it could not at any length, if its further tokens had probability 1.

    Raises ValueError as ``generate`` does, and for a num_return above num_beams.
    """
    for name, number in (("num_beams", num_beams), ("num_return", num_return)):
        starts.positive(name, number)
    if num_return > num_beams:
        raise ValueError(f"num_return={num_return} is more than num_beams={num_beams}")
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise ValueError(f"early_stopping={early_stopping!r} must be True, False or 'never'")
    if isinstance(length_penalty, bool) or not isinstance(length_penalty, int | float) or not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty={length_penalty!r} must be a finite number")
    given = {"valid": valid, "source": source, "source_valid": source_valid, "eos": eos, "pad": pad}
    given |= {"prefill_chunk": prefill_chunk, "cache_dtype": cache_dtype}
    start = starts.begin(params, prompts, cfg, max_new_tokens=max_new_tokens, **given)
    if num_beams + len(start.eos) > cfg.vocab_size:
        raise ValueError(
            f"num_beams={num_beams} and {len(start.eos)} end ids are too many for a vocabulary of {cfg.vocab_size}"
        )
    plan = _Plan(
        cfg=cfg,
        beams=num_beams,
        max_new_tokens=max_new_tokens,
        slots=start.slots,
        eos=start.eos,
        pad=start.pad,
        chunk=start.chunk,
        length_penalty=float(length_penalty),
        early_stopping=early_stopping,
        cache_dtype=start.cache_dtype,
    )
    best = _search(params, start.ids, start.lengths, start.source, plan=plan)
    return Beams(best.tokens[:, :num_return], best.scores[:, :num_return], best.lengths[:, :num_return])


@functools.partial(jax.jit, static_argnames="plan")
def _search(params, prompts, lengths, source, *, plan: _Plan) -> _Hypotheses:
    params = model.unstack(params, plan.cfg)
    batch, n = len(prompts), plan.beams
    cache = empty(spec(plan.cfg, batch, plan.slots, plan.cache_dtype), plan.cfg)
    last_BD, cache, _ = loop.prefill(params, prompts, lengths, cache, plan.cfg, plan.chunk, **source)
    row = jnp.repeat(jnp.arange(batch), n)
    none = _Hypotheses(
        jnp.full((batch, n, plan.max_new_tokens), plan.pad), jnp.zeros((batch, n), jnp.int32), jnp.full((batch, n), NEVER)
    )
    # All beams of a row start as the same hypothesis: only the first may continue, or all would choose the same tokens.
    running = none.replace(scores=none.scores.at[:, 0].set(0.0))  # type: ignore[attr-defined]
    state = _State(cache.take(row), running, none, jnp.ones(batch, bool), jnp.zeros((), jnp.int32))
    state = _extend(params, last_BD[row], state, plan)

    def step(state: _State) -> _State:
        token = jnp.take_along_axis(state.running.tokens, (state.running.lengths - 1)[..., None], axis=-1).reshape(-1, 1)
        hidden_BTD, cache, _ = model.apply(params, token, plan.cfg, cache=state.cache)
        return _extend(params, hidden_BTD[:, 0], state.replace(cache=cache), plan)  # type: ignore[attr-defined]

    return jax.lax.while_loop(lambda state: (state.step < plan.max_new_tokens) & state.open.any(), step, state).finished


def _extend(params, last_BD, state: _State, plan: _Plan) -> _State:
    """One more token for the running hypotheses."""
    candidates, parents = _candidates(params, last_BD, state, plan)
    tokens = jnp.take_along_axis(candidates.tokens, (candidates.lengths - 1)[..., None], axis=-1)[..., 0]
    ended = (state.step + 1 >= plan.max_new_tokens) | jnp.isin(tokens, jnp.array(plan.eos, jnp.int32))
    finished = _finished(candidates, ended, state, plan)
    order = jax.lax.top_k(jnp.where(ended, NEVER, candidates.scores), plan.beams)[1]
    running = _pick(candidates, order)
    parents = jnp.take_along_axis(parents, order, axis=1)
    batch = len(parents)
    row = (jnp.arange(batch)[:, None] * plan.beams + parents).reshape(-1)
    open_ = state.open & _improvable(running, finished, state.step + 1, plan)
    return _State(state.cache.take(row, source=False), running, finished, open_, state.step + 1)


def _candidates(params, last_BD, state: _State, plan: _Plan) -> tuple[_Hypotheses, jax.Array]:
    """The best continuations of a row's beams, as many as leave n that go on even if each end token has been chosen for each
    beam; and which beam each continues."""
    n = plan.beams
    logp = jax.nn.log_softmax(model.head(params, last_BD[:, None], plan.cfg)[:, 0])
    vocab = logp.shape[-1]
    total = (logp.reshape(-1, n, vocab) + state.running.scores[..., None]).reshape(-1, n * vocab)
    scores, flat = jax.lax.top_k(total, n * max(2, 1 + len(plan.eos)))
    parents = flat // vocab
    before = _pick(state.running, parents)
    at = jnp.arange(plan.max_new_tokens) == before.lengths[..., None]
    tokens = jnp.where(at, (flat % vocab)[..., None], before.tokens)
    return _Hypotheses(tokens, before.lengths + 1, scores), parents


def _finished(candidates: _Hypotheses, ended, state: _State, plan: _Plan) -> _Hypotheses:
    """The best n finished hypotheses, with those among the best n candidates that have just ended."""
    scores = candidates.scores / (state.step + 1).astype(jnp.float32) ** plan.length_penalty
    full = (state.finished.scores > NEVER).all(1) if plan.early_stopping is True else jnp.zeros(len(ended), bool)
    counts = ended & (jnp.arange(ended.shape[1]) < plan.beams) & (state.open & ~full)[:, None]
    new = _Hypotheses(candidates.tokens, candidates.lengths, jnp.where(counts, scores, NEVER))
    both = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), state.finished, new)
    return _pick(both, jax.lax.top_k(both.scores, plan.beams)[1])


def _improvable(running: _Hypotheses, finished: _Hypotheses, length, plan: _Plan) -> jax.Array:
    """[B]: whether the best running hypothesis may still beat the worst finished one (or there are fewer than n of those)."""
    full = (finished.scores > NEVER).all(1)
    if plan.early_stopping is True:
        return ~full
    longest = plan.early_stopping == "never" and plan.length_penalty > 0
    at_length = plan.max_new_tokens if longest else length.astype(jnp.float32)
    best = running.scores[:, 0] / at_length**plan.length_penalty
    return ~full | (best > finished.scores.min(1))


def _pick(hypotheses: _Hypotheses, order: jax.Array) -> _Hypotheses:
    """Those of each row that ``order`` [B, m] names."""

    def one(x):
        return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)

    return jax.tree.map(one, hypotheses)
