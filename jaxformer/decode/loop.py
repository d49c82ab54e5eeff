"""The parts of generation that run inside jit: prefill in chunks, a token a row, blocks of steps until every row has ended."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.config import ModelConfig
from jaxformer.decode import sampling
from jaxformer.decode.sampling import History, Methods
from jaxformer.nn import model
from jaxformer.nn.cache import Cache
from jaxformer.nn.cache_spec import empty, spec

BLOCK = 16  # steps between looks at whether every row has ended


@dataclass(frozen=True)
class Plan:
    """What is compiled for."""

    cfg: ModelConfig
    max_new_tokens: int
    eos: tuple[int, ...]
    pad: int
    methods: Methods
    slots: int
    """Length of the cache."""
    chunk: int
    """Prompt tokens read at a time."""
    copies: int = 1
    """Outputs a prompt."""
    top: int = 0
    """Most probable tokens to report at each step."""
    cache_dtype: str | None = None
    ahead: int = 0
    """Tokens that may be taken back."""


@struct.dataclass
class State:
    """Where every row stands between two tokens."""

    cache: Any
    token: Any
    """int32 [B]: the last one chosen, which the cache does not hold yet."""
    done: Any
    """bool [B]"""
    new: Any
    """int32 [B]: tokens generated so far."""
    keys: Any
    """[B]: each row's own randomness."""
    history: History | None


@struct.dataclass
class Emitted:
    """One token a row, [B] each, and the ``top`` most probable ones, [B, top]."""

    token: Any
    logprob: Any
    alive: Any
    top_tokens: Any
    top_logprobs: Any


def prefill(
    params, prompts, lengths, cache: Cache, cfg: ModelConfig, chunk: int, block: Cache | None = None, **source
) -> tuple[jax.Array, Cache, Cache | None]:
    """Reads prompts [B, T] of ``lengths`` [B]: what the head reads of each row's last token, [B, D], and the cache. block: an
    empty cache of ``model.after_next``, which then has read all but the last."""
    batch, length = prompts.shape

    def read(caches, start, tokens, following, **source):
        cache, block = caches
        at = lengths[:, None] - 1 - start  # of the last token, in this chunk
        number = jnp.arange(tokens.shape[1])
        hidden_BTD, cache, _ = model.apply(params, tokens, cfg, valid=number <= at, cache=cache, **source)
        if block is not None:
            _, block, _ = model.after_next(params, hidden_BTD, following, cfg, valid=number < at, cache=block)
        here = jnp.clip(at, 0, tokens.shape[1] - 1)[..., None]
        last_BD = jnp.take_along_axis(hidden_BTD, here, axis=1)[:, 0]
        return last_BD, (at >= 0) & (at < tokens.shape[1]), (cache, block)

    following = jnp.pad(prompts[:, 1:], ((0, 0), (0, 1)))
    if length <= chunk:
        last_BD, _, caches = read((cache, block), 0, prompts, following, **source)
        return last_BD, *caches
    chunks, following = (
        jnp.pad(x, ((0, 0), (0, -length % chunk))).reshape(batch, -1, chunk).swapaxes(0, 1) for x in (prompts, following)
    )
    last_BD, _, caches = read((cache, block), 0, chunks[0], following[0], **source)

    def step(carry, x):
        last_BD, caches = carry
        found_BD, here, caches = read(caches, *x)
        return (jnp.where(here, found_BD, last_BD), caches), None

    starts = jnp.arange(chunk, len(chunks) * chunk, chunk)
    last_BD, caches = jax.lax.scan(step, (last_BD, caches), (starts, chunks[1:], following[1:]))[0]
    return last_BD, *caches


def start(params, prompts, lengths, key, values, plan: Plan, **source) -> tuple[State, Emitted]:
    """Reads the prompts and chooses each row's first token."""
    return start_with(params, prompts, lengths, key, values, plan, None, **source)[:2]


def start_with(params, prompts, lengths, key, values, plan: Plan, block: Cache | None, **source):
    """``start``, and what the head read of each row's last token, [rows, D], and ``prefill``'s block."""
    rows = len(prompts) * plan.copies
    cache = empty(spec(plan.cfg, len(prompts), plan.slots, plan.cache_dtype, plan.ahead), plan.cfg)
    last_BD, cache, block = prefill(params, prompts, lengths, cache, plan.cfg, plan.chunk, block, **source)
    if plan.copies > 1:
        row = jnp.repeat(jnp.arange(len(prompts)), plan.copies)
        last_BD, cache, prompts, lengths = last_BD[row], cache.take(row), prompts[row], lengths[row]
        block = None if block is None else block.take(row)
    state = State(
        cache=cache,
        token=jnp.zeros(rows, jnp.int32),
        done=jnp.zeros(rows, bool),
        new=jnp.zeros(rows, jnp.int32),
        keys=jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows)),
        history=_history(prompts, lengths, plan) if plan.methods.remembers else None,
    )
    return *emit(params, last_BD, state, values, plan), last_BD, block


def _history(prompts, lengths, plan: Plan) -> History:
    rows, vocab = len(prompts), plan.cfg.vocab_size
    tokens = jnp.where(jnp.arange(prompts.shape[1]) < lengths[:, None], prompts, vocab)  # padding is out of range: dropped
    seen = jnp.zeros((rows, vocab), bool).at[jnp.arange(rows)[:, None], tokens].set(True, mode="drop")
    return History(seen, jnp.zeros((rows, vocab), jnp.int32))


def emit(params, last_BD, state: State, values, plan: Plan) -> tuple[State, Emitted]:
    """Chooses a token for every row that has not ended."""
    logits = model.head(params, last_BD[:, None], plan.cfg)[:, 0]
    shaped = sampling.shape(logits, plan.methods, values, state.history, state.new, plan.eos)
    chosen = sampling.choose(shaped, plan.methods, jax.vmap(jax.random.fold_in)(state.keys, state.new))
    alive = ~state.done
    token = jnp.where(alive, chosen, plan.pad)
    found = report(logits, shaped, token, plan)
    out = Emitted(
        token=token,
        logprob=jnp.where(alive, found.logprob, 0.0),
        alive=alive,
        top_tokens=jnp.where(alive[:, None], found.top_tokens, plan.pad),
        top_logprobs=jnp.where(alive[:, None], found.top_logprobs, 0.0),
    )
    return advance(state, token, plan), out


def report(logits, shaped, token, plan: Plan) -> Emitted:
    """What is told of ``token`` [...], chosen by ``shaped`` of the model's ``logits`` [..., V]. Where no token could be chosen
    (all are −inf or NaN), its log-probability is NaN."""
    total = jax.nn.logsumexp(logits, axis=-1)
    logprob = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0] - total
    logprob = jnp.where(jnp.isfinite(shaped.max(-1)), logprob, jnp.nan)
    top_logits, top_tokens = jax.lax.top_k(logits, plan.top)
    return Emitted(token, logprob, jnp.ones(token.shape, bool), top_tokens, top_logits - total[..., None])


def advance(state: State, token, plan: Plan) -> State:
    """The state after ``token`` [B] of the rows that had not ended."""
    alive = ~state.done
    new = state.new + alive
    history = state.history
    if history is not None:
        counts = history.counts.at[jnp.arange(len(token)), token].add(alive.astype(jnp.int32))
        history = dataclasses.replace(history, counts=counts)
    done = state.done | (new >= plan.max_new_tokens)
    if plan.eos:
        done = done | jnp.isin(token, jnp.array(plan.eos))
    return dataclasses.replace(state, token=token, done=done, new=new, history=history)


def step(params, state: State, values, plan: Plan) -> tuple[State, Emitted]:
    """Reads each row's last token and chooses its next."""
    fed = ~state.done[:, None]
    hidden_BTD, cache, _ = model.apply(params, state.token[:, None], plan.cfg, valid=fed, cache=state.cache)
    return emit(params, hidden_BTD[:, 0], dataclasses.replace(state, cache=cache), values, plan)


def block(params, state: State, values, plan: Plan, steps: int) -> tuple[State, Emitted]:
    """``steps`` steps: a ``lax.scan``. What they emit is stacked on a leading axis."""
    return jax.lax.scan(lambda state, _: step(params, state, values, plan), state, None, length=steps)


def run(params, state: State, first: Emitted, values, plan: Plan) -> Emitted:
    """All further tokens, in blocks, until every row has ended: stacked after ``first``, [max_new_tokens, B] each."""
    steps = plan.max_new_tokens - 1
    blocks = -(-steps // BLOCK) if plan.eos else 1
    size = -(-steps // max(blocks, 1))
    silent = jax.tree.map(jnp.zeros_like, first)
    silent = dataclasses.replace(silent, token=silent.token + plan.pad, top_tokens=silent.top_tokens + plan.pad)
    out = jax.tree.map(lambda x: jnp.broadcast_to(x, (blocks * size, *x.shape)), silent)
    if steps:
        if blocks == 1:
            _, out = block(params, state, values, plan, steps)
        else:
            out = _until_done(params, state, out, values, plan, blocks, size)
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b])[: plan.max_new_tokens], first, out)


def _until_done(params, state, out, values, plan, blocks: int, size: int) -> Emitted:
    def open_(carry):
        number, state, _ = carry
        return (number < blocks) & ~state.done.all()

    def more(carry):
        number, state, out = carry
        state, emitted = block(params, state, values, plan, size)
        put = lambda all_, part: jax.lax.dynamic_update_slice_in_dim(all_, part, number * size, axis=0)
        return number + 1, state, jax.tree.map(put, out, emitted)

    return jax.lax.while_loop(open_, more, (jnp.zeros((), jnp.int32), state, out))[2]
