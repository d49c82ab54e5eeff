"""Speculative decoding: several tokens are guessed, one forward judges them all, and the result is that of plain decoding.

Greedy output is the same; sampled output has the same distribution (Leviathan et al. 2023; Chen et al. 2023). Guesses come from
a smaller model with the same tokenizer, from what followed the last few tokens earlier in the text (prompt look-up), or from
the model's block for the token after the next (``mtp``).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.decode import loop, propose
from jaxformer.decode.choose import choose, shape
from jaxformer.decode.drafts import DraftModel, MultiToken, PromptLookup
from jaxformer.decode.loop import Emitted, State
from jaxformer.decode.propose import Unread
from jaxformer.decode.request import Inputs, Request
from jaxformer.nn import model
from jaxformer.nn.cache import Cache


@struct.dataclass
class _Round:
    """Between two rounds: where the rows stand, what the guesses come from, and the counts."""

    state: State
    unread: Unread | None
    """What the draft reads next; None for a look-up."""
    text: Any
    """int32 [B, S]: prompt and output, for look-up."""
    length: Any
    """int32 [B]: tokens of ``text``."""
    offered: Any
    accepted: Any
    """int32 [B]: guesses made, and those that were right."""
    out: Emitted
    """[B, max_new_tokens, …]"""


def run(params: dict, inputs: Inputs, request: Request) -> tuple[Emitted, jax.Array]:
    """All tokens, [B, max_new_tokens] each, and the share [B] of guesses that were right. The layers of ``params`` are
    unstacked."""
    draft, prompts = request.draft, inputs.prompts
    draft_params = model.unstack(inputs.draft_params, draft.cfg) if isinstance(draft, DraftModel) else params
    mtp_cache = propose.mtp_cache(request, len(prompts))
    last_BD, cache, mtp_cache = loop.read(params, inputs, request, mtp_cache)
    state, first = loop.begin(params, last_BD, cache, inputs, request)
    unread = propose.start(draft_params, inputs, request, mtp_cache, last_BD, state.token)
    row = loop.copied(len(prompts), request)
    text = jnp.pad(prompts, ((0, 0), (0, max(0, request.cache_length - prompts.shape[1]))))[row]
    nothing = jnp.zeros(len(row), jnp.int32)
    out = loop.silence(first, request, 1, request.max_new_tokens)
    out = _put(out, jax.tree.map(lambda x: x[:, None], first), nothing, nothing + 1)
    text = _append(text, state.token[:, None], inputs.lengths[row], nothing + 1)
    carry = _Round(state, unread, text, inputs.lengths[row] + 1, nothing, nothing, out)
    step = lambda carry: _round(params, draft_params, carry, inputs.values, request)
    carry = jax.lax.while_loop(lambda carry: ~carry.state.done.all(), step, carry)
    return carry.out, carry.accepted.astype(jnp.float32) / jnp.maximum(carry.offered, 1)


def _round(params, draft_params, carry: _Round, values, request: Request) -> _Round:
    """Guess, judge, keep what is right and one token more."""
    state, draft, ahead = carry.state, request.draft, request.ahead
    keys = jax.vmap(lambda key, new: jax.random.split(jax.random.fold_in(key, new), 3))(state.keys, state.new)
    shaped_q = draft_cache = None
    if carry.unread is not None:
        guesses, shaped_q, draft_cache = propose.draw(draft_params, carry.unread, state, keys[:, 0], values, request)
        offered = jnp.full_like(state.new, ahead)
    else:
        assert isinstance(draft, PromptLookup)
        guesses, offered = propose.look_up(carry.text, carry.length, draft)
    tokens = jnp.concatenate([state.token[:, None], guesses], axis=1)
    fed = jnp.broadcast_to(~state.done[:, None], tokens.shape)
    hidden_BTD, cache = propose.read_guesses(params, tokens, fed, state.cache, request.cfg)
    logits = model.head(params, hidden_BTD, request.cfg)
    shaped_p = _shape(logits, guesses, state, values, request)
    right, last = _judge(shaped_p, shaped_q, guesses, keys, request)
    chosen = jnp.where(jnp.arange(ahead + 1) < right[:, None], jnp.pad(guesses, ((0, 0), (0, 1))), last[:, None])
    count = _count(chosen, right, state, request)
    offered = jnp.where(state.done, 0, jnp.minimum(offered, request.max_new_tokens - state.new))
    read_BTD = hidden_BTD if isinstance(draft, MultiToken) else None
    return _Round(
        state=_settle(state, cache, chosen, count, request),
        unread=None if draft_cache is None else Unread(draft_cache, chosen, count, read_BTD),
        text=_append(carry.text, chosen, carry.length, count),
        length=carry.length + count,
        offered=carry.offered + offered,
        accepted=carry.accepted + jnp.minimum(jnp.minimum(right, count), offered),
        out=_put(carry.out, loop.report(logits, jnp.swapaxes(shaped_p, 0, 1), chosen, request), state.new, count),
    )


def _shape(logits, guesses, state: State, values, request: Request) -> jax.Array:
    """Logits [T, B, V] that each token would be drawn from, if the guesses before it were right."""

    def step(state, x):
        logits, token = x
        shaped = shape(logits, request.methods, values, state.history, state.new, request.eos)
        return dataclasses.replace(loop.advance(state, token, request), done=state.done), shaped

    small = dataclasses.replace(state, cache=None)
    tokens = jnp.pad(guesses, ((0, 0), (0, 1))).T
    return jax.lax.scan(step, small, (jnp.swapaxes(logits, 0, 1), tokens))[1]


def _judge(shaped_p, shaped_q, guesses, keys, request: Request) -> tuple[jax.Array, jax.Array]:
    """How many guesses of each row are kept, [B], and the token [B] that follows them.

    A guess x ~ q is kept with probability min(1, p(x) / q(x)); the first that is not is replaced by a draw from the positive
    part of p − q. After no rejection a draw from p follows. Looked-up guesses have q(x) = 1.
    """
    if request.methods.greedy:
        best = jnp.argmax(shaped_p, axis=-1).T.astype(jnp.int32)
        right = jnp.cumprod(best[:, :-1] == guesses, axis=1).sum(1, dtype=jnp.int32)
        return right, jnp.take_along_axis(best, right[:, None], axis=1)[:, 0]
    p = jnp.swapaxes(jax.nn.softmax(shaped_p), 0, 1)  # [B, T, V]
    vocab = p.shape[-1]
    q = jax.nn.one_hot(guesses, vocab, dtype=jnp.float32) if shaped_q is None else jnp.swapaxes(jax.nn.softmax(shaped_q), 0, 1)
    p_x, q_x = (jnp.take_along_axis(x[:, : guesses.shape[1]], guesses[..., None], axis=-1)[..., 0] for x in (p, q))
    uniform = jax.vmap(lambda key: jax.random.uniform(key, guesses.shape[1:], jnp.float32))(keys[:, 1])
    right = jnp.cumprod(uniform * q_x < p_x, axis=1).sum(1, dtype=jnp.int32)
    at = right[:, None, None]
    p_last = jnp.take_along_axis(p, at, axis=1)[:, 0]
    q_last = jnp.take_along_axis(jnp.pad(q, ((0, 0), (0, 1), (0, 0))), at, axis=1)[:, 0]  # 0 after no rejection
    rest = jnp.maximum(p_last - q_last, 0.0)
    rest = jnp.where(rest.sum(-1, keepdims=True) > 0, rest, p_last)  # p = q up to rounding
    return right, choose(jnp.log(rest), request.methods, keys[:, 2])


def _count(chosen, right, state: State, request: Request) -> jax.Array:
    """Tokens [B] that each row gains: the right guesses and one more, up to an end token and to the row's room."""
    count = jnp.minimum(right + 1, request.max_new_tokens - state.new)
    if request.eos:
        ends = jnp.isin(chosen, jnp.array(request.eos))
        count = jnp.minimum(count, jnp.where(ends.any(1), ends.argmax(1).astype(jnp.int32) + 1, chosen.shape[1]))
    return jnp.where(state.done, 0, count)


def _settle(state: State, cache: Cache, chosen, count, request: Request) -> State:
    """The state after each row's ``count`` tokens; its cache has read all but the last."""
    state = dataclasses.replace(state, cache=None)
    for number in range(chosen.shape[1]):
        advanced = loop.advance(state, chosen[:, number], request)
        here = number < count

        def keep(new, old, here=here):
            return jnp.where(here.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        state = jax.tree.map(keep, advanced, state)
    return dataclasses.replace(state, cache=cache.rewind(cache.used - jnp.where(count > 0, chosen.shape[1] - count, 0)))


def _put(out: Emitted, new: Emitted, start, count) -> Emitted:
    """``out`` [B, max_new_tokens, …] with each row's first ``count`` of ``new`` [B, T, …] from ``start`` on."""
    return jax.tree.map(lambda x, more: _append(x, more, start, count), out, new)


def _append(x, more, start, count):
    number = jnp.arange(more.shape[1])
    at = jnp.where(number < count[:, None], start[:, None] + number, x.shape[1] + number)
    return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(x, at, more)
