"""Speculative decoding: several tokens are guessed, one forward judges them all, and the result is that of plain decoding.

Greedy output is the same; sampled output has the same distribution (Leviathan et al. 2023; Chen et al. 2023). Guesses come from
a smaller model of the same tokenizer, from what followed the last few tokens earlier in the text (prompt look-up), or from the
model's own block for the token after the next (``multitoken``).
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.config import ModelConfig
from jaxformer.config.strict import Strict, within
from jaxformer.decode import loop, multitoken, sampling
from jaxformer.decode.loop import Emitted, Plan, State
from jaxformer.decode.multitoken import Pairs
from jaxformer.nn import model
from jaxformer.nn.cache import Cache
from jaxformer.nn.cache_spec import empty, spec


@dataclass(frozen=True)
class PromptLookup(Strict):
    """Guesses what followed the last occurrence of the text's last tokens: good where output repeats input."""

    ahead: int = 8
    """Tokens guessed at a time."""
    ngram: int = 3
    """Tokens that are compared at most; the longest match wins, then the latest."""

    def __post_init__(self):
        super().__post_init__()
        within(self, 1, float("inf"), "ahead", "ngram")


@dataclass(frozen=True, eq=False)
class DraftModel(Strict):
    """Guesses with another model of the same vocabulary."""

    params: dict
    cfg: ModelConfig
    ahead: int = 4
    """Tokens guessed at a time."""

    def __post_init__(self):
        super().__post_init__()
        within(self, 1, float("inf"), "ahead")


@dataclass(frozen=True)
class Guessing:
    """The part of a draft that decides what is compiled. ngram: of a look-up; cfg: the draft model's; own: whether it is the
    model's own block."""

    ahead: int
    ngram: int = 0
    cfg: ModelConfig | None = None
    own: bool = False


@struct.dataclass
class _Round:
    """Between two rounds: where the rows stand, what the guesses come from, and the counts."""

    state: State
    draft: Cache | Pairs | None
    text: Any
    """int32 [B, S]: prompt and output, for look-up."""
    length: Any
    """int32 [B]: tokens of ``text``."""
    offered: Any
    accepted: Any
    """int32 [B]: guesses made, and those that were right."""
    out: Emitted
    """[B, max_new_tokens, …]"""


@functools.partial(jax.jit, static_argnames=("plan", "guessing"))
def speculate(params, draft_params, prompts, lengths, key, values, source, *, plan: Plan, guessing: Guessing):
    """What ``loop.run`` gives, and the guesses offered and accepted by row."""
    params = model.unstack(params, plan.cfg)
    block = multitoken.begin(plan, len(prompts)) if guessing.own else None
    state, first, last_BD, block = loop.start_with(params, prompts, lengths, key, values, plan, block, **source)
    row = jnp.repeat(jnp.arange(len(prompts)), plan.copies)
    draft: Any = None if block is None else multitoken.first(block, last_BD, state.token, guessing.ahead)
    if guessing.cfg is not None:
        draft_params = model.unstack(draft_params, guessing.cfg)
        draft = empty(spec(guessing.cfg, len(prompts), plan.slots, plan.cache_dtype, plan.ahead), guessing.cfg)
        given = source if guessing.cfg.encoder_layers else {}
        _, draft, _ = loop.prefill(draft_params, prompts, lengths, draft, guessing.cfg, plan.chunk, **given)
        draft = draft.take(row)
    text = jnp.pad(prompts, ((0, 0), (0, max(0, plan.slots - prompts.shape[1]))))[row]
    nothing = jnp.zeros(len(row), jnp.int32)
    out = jax.tree.map(lambda x: jnp.zeros((x.shape[0], plan.max_new_tokens, *x.shape[1:]), x.dtype), first)
    out = dataclasses.replace(out, token=out.token + plan.pad, top_tokens=out.top_tokens + plan.pad)
    out = _put(out, jax.tree.map(lambda x: x[:, None], first), nothing, nothing + 1)
    text = _append(text, state.token[:, None], lengths[row], nothing + 1)
    carry = _Round(state, draft, text, lengths[row] + 1, nothing, nothing, out)
    step = lambda carry: _round(params, draft_params, carry, values, plan, guessing)
    carry = jax.lax.while_loop(lambda carry: ~carry.state.done.all(), step, carry)
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), carry.out), carry.offered, carry.accepted


def _round(params, draft_params, carry: _Round, values, plan: Plan, guessing: Guessing) -> _Round:
    """Guess, judge, keep what is right and one token more."""
    state = carry.state
    keys = jax.vmap(lambda key, new: jax.random.split(jax.random.fold_in(key, new), 3))(state.keys, state.new)
    offered, shaped_q, draft = jnp.full_like(state.new, guessing.ahead), None, None
    if guessing.own:
        assert isinstance(carry.draft, Pairs)
        guesses, shaped_q, draft = multitoken.draw(params, carry.draft, state, keys[:, 0], values, plan, guessing.ahead)
    elif guessing.cfg is None:
        guesses, offered = _look_up(carry.text, carry.length, guessing)
    else:
        guesses, shaped_q, draft = _draw(draft_params, carry.draft, state, keys[:, 0], values, plan, guessing)
    tokens = jnp.concatenate([state.token[:, None], guesses], axis=1)
    hidden_BTD, cache = _read(params, tokens, state, state.cache, plan.cfg)
    logits = model.head(params, hidden_BTD, plan.cfg)
    shaped_p = _shape(logits, guesses, state, values, plan)
    right, last = _judge(shaped_p, shaped_q, guesses, keys, plan)
    chosen = jnp.where(jnp.arange(guessing.ahead + 1) < right[:, None], jnp.pad(guesses, ((0, 0), (0, 1))), last[:, None])
    count = _count(chosen, right, state, plan)
    out = _put(carry.out, loop.report(logits, jnp.swapaxes(shaped_p, 0, 1), chosen, plan), state.new, count)
    new_state = _settle(state, cache, chosen, count, plan)
    next_draft: Any = None
    if guessing.own:
        assert draft is not None
        next_draft = Pairs(draft, hidden_BTD, chosen, count)
    elif draft is not None:
        next_draft = draft.rewind(state.cache.used + count)
    offered = jnp.where(state.done, 0, jnp.minimum(offered, plan.max_new_tokens - state.new))
    return _Round(
        state=new_state,
        draft=next_draft,
        text=_append(carry.text, chosen, carry.length, count),
        length=carry.length + count,
        offered=carry.offered + offered,
        accepted=carry.accepted + jnp.minimum(jnp.minimum(right, count), offered),
        out=out,
    )


def _read(params, tokens, state: State, cache: Cache, cfg: ModelConfig) -> tuple[jax.Array, Cache]:
    """A chunk of guesses through a model. Those past a learned table are never kept; they read its last row."""
    length = tokens.shape[1]
    positions = (
        jnp.minimum(cache.used[:, None] + jnp.arange(length), cfg.max_length - 1) if "learned" in cfg.positions else None
    )
    fed = jnp.broadcast_to(~state.done[:, None], tokens.shape)
    out = model.apply(params, tokens, cfg, positions=positions, valid=fed, cache=cache)
    assert out.cache is not None
    return out.hidden, out.cache


def _draw(params, cache: Any, state: State, keys, values, plan: Plan, guessing: Guessing):
    """Guesses [B, ahead] of the draft model, the logits [ahead, B, V] they were drawn from, and its cache, with all in it."""
    cfg = guessing.cfg
    assert cfg is not None

    def step(carry, number):
        state, cache = carry
        hidden_BTD, cache = _read(params, state.token[:, None], state, cache, cfg)
        logits = model.head(params, hidden_BTD, cfg)[:, 0]
        shaped = sampling.shape(logits, plan.methods, values, state.history, state.new, plan.eos)
        token = sampling.choose(shaped, plan.methods, jax.vmap(lambda key: jax.random.fold_in(key, number))(keys))
        advanced = loop.advance(state, token, plan)
        # An end token among the guesses ends nothing yet.
        return (dataclasses.replace(advanced, done=state.done), cache), (token, shaped)

    # One step more than guesses: where all are right, the cache must have read the last of them too.
    (_, cache), (tokens, shaped) = jax.lax.scan(step, (state, cache), jnp.arange(guessing.ahead + 1))
    return tokens[:-1].T, shaped[:-1], cache


def _look_up(text, length, guessing: Guessing) -> tuple[jax.Array, jax.Array]:
    """Guesses [B, ahead]: what follows the latest of the longest earlier matches of the text's end; and how many there are."""
    width = text.shape[1]
    at = jnp.arange(width)
    alike = jnp.ones(text.shape, bool)
    match = jnp.zeros(text.shape, jnp.int32)
    for back in range(guessing.ngram):  # text[j − back] against the text's end
        end = jnp.take_along_axis(text, jnp.maximum(length[:, None] - 1 - back, 0), axis=1)
        alike = alike & (jnp.roll(text, back, axis=1) == end) & (at >= back) & (length[:, None] > back)
        match = match + alike
    match = jnp.where(at < length[:, None] - 1, match, 0)  # the end itself is no match
    found = (match * width + at).argmax(1)
    some = match.max(1) > 0
    guesses = jnp.take_along_axis(text, jnp.minimum(found[:, None] + 1 + jnp.arange(guessing.ahead), width - 1), axis=1)
    return guesses, jnp.where(some, jnp.minimum(guessing.ahead, length - 1 - found), 0)


def _shape(logits, guesses, state: State, values, plan: Plan) -> jax.Array:
    """Logits [T, B, V] that each token would be drawn from, if the guesses before it were right."""

    def step(state, x):
        logits, token = x
        shaped = sampling.shape(logits, plan.methods, values, state.history, state.new, plan.eos)
        return dataclasses.replace(loop.advance(state, token, plan), done=state.done), shaped

    small = dataclasses.replace(state, cache=None)
    tokens = jnp.pad(guesses, ((0, 0), (0, 1))).T
    return jax.lax.scan(step, small, (jnp.swapaxes(logits, 0, 1), tokens))[1]


def _judge(shaped_p, shaped_q, guesses, keys, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """How many guesses of each row are kept, [B], and the token [B] that follows them.

    A guess x ~ q is kept with probability min(1, p(x) / q(x)); the first that is not is replaced by a draw from the positive
    part of p − q. After no rejection a draw from p follows. Looked-up guesses have q(x) = 1.
    """
    if plan.methods.greedy:
        best = jnp.argmax(shaped_p, axis=-1).T.astype(jnp.int32)
        right = jnp.cumprod(best[:, :-1] == guesses, axis=1).sum(1)
        return right, jnp.take_along_axis(best, right[:, None], axis=1)[:, 0]
    p = jnp.swapaxes(jax.nn.softmax(shaped_p), 0, 1)  # [B, T, V]
    vocab = p.shape[-1]
    q = jax.nn.one_hot(guesses, vocab) if shaped_q is None else jnp.swapaxes(jax.nn.softmax(shaped_q), 0, 1)
    p_x, q_x = (jnp.take_along_axis(x[:, : guesses.shape[1]], guesses[..., None], axis=-1)[..., 0] for x in (p, q))
    uniform = jax.vmap(lambda key: jax.random.uniform(key, guesses.shape[1:]))(keys[:, 1])
    right = jnp.cumprod(uniform * q_x < p_x, axis=1).sum(1)
    at = right[:, None, None]
    p_last = jnp.take_along_axis(p, at, axis=1)[:, 0]
    q_last = jnp.take_along_axis(jnp.pad(q, ((0, 0), (0, 1), (0, 0))), at, axis=1)[:, 0]  # 0 after no rejection
    rest = jnp.maximum(p_last - q_last, 0.0)
    rest = jnp.where(rest.sum(-1, keepdims=True) > 0, rest, p_last)  # p = q up to rounding
    return right, sampling.choose(jnp.log(rest), plan.methods, keys[:, 2])


def _count(chosen, right, state: State, plan: Plan) -> jax.Array:
    """Tokens [B] that each row gains: the right guesses and one more, up to an end token and to the row's room."""
    count = jnp.minimum(right + 1, plan.max_new_tokens - state.new)
    if plan.eos:
        ends = jnp.isin(chosen, jnp.array(plan.eos))
        count = jnp.minimum(count, jnp.where(ends.any(1), ends.argmax(1) + 1, chosen.shape[1]))
    return jnp.where(state.done, 0, count)


def _settle(state: State, cache: Cache, chosen, count, plan: Plan) -> State:
    """The state after each row's ``count`` tokens; its cache has read all but the last."""
    for number in range(chosen.shape[1]):
        advanced = loop.advance(state, chosen[:, number], plan)
        here = number < count

        def keep(new, old, here=here):
            return jnp.where(here.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        parts = {name: getattr(advanced, name) for name in ("token", "done", "new", "history")}
        state = dataclasses.replace(state, **{n: jax.tree.map(keep, part, getattr(state, n)) for n, part in parts.items()})
    return dataclasses.replace(state, cache=cache.rewind(cache.used - jnp.where(count > 0, chosen.shape[1] - count, 0)))


def _put(out: Emitted, new: Emitted, start, count) -> Emitted:
    """``out`` [B, max_new_tokens, …] with each row's first ``count`` of ``new`` [B, T, …] from ``start`` on."""
    return jax.tree.map(lambda all_, part: _append(all_, part, start, count), out, new)


def _append(all_, part, start, count):
    number = jnp.arange(part.shape[1])
    at = jnp.where(number < count[:, None], start[:, None] + number, all_.shape[1] + number)
    return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(all_, at, part)
