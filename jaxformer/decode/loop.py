"""Generation inside jit: prompts read in chunks, one token per row and step, blocks of steps until every row has ended."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.config import ModelConfig
from jaxformer.decode.choose import History, choose, shape
from jaxformer.decode.request import Inputs, Request
from jaxformer.nn import model
from jaxformer.nn.cache import Cache
from jaxformer.nn.cache_spec import empty, spec

BLOCK = 16  # steps between checks of whether every row has ended


@struct.dataclass
class State:
    """Where every row stands between two tokens."""

    cache: Any
    token: Any
    """int32 [B]: the token chosen last, which the cache does not hold yet."""
    done: Any
    """bool [B]"""
    new: Any
    """int32 [B]: tokens generated so far."""
    keys: Any
    """[B]: one random key per row."""
    history: History | None


@struct.dataclass
class Emitted:
    """One token per row, [B] each, and the ``top_logprobs`` most probable tokens, [B, top_logprobs]; or those of many steps."""

    token: Any
    logprob: Any
    alive: Any
    top_tokens: Any
    top_logprobs: Any


def prefill(
    params, prompts, lengths, cache: Cache, cfg: ModelConfig, chunk: int, mtp_cache: Cache | None = None, **source
) -> tuple[jax.Array, Cache, Cache | None]:
    """Reads prompts [B, T] of ``lengths`` [B]: what the head reads of each row's last token, [B, D], and the cache. mtp_cache:
    an empty cache of ``model.after_next``, which then has read all but the last."""
    batch, length = prompts.shape

    def read(caches, start, tokens, following, **source):
        cache, mtp_cache = caches
        at = lengths[:, None] - 1 - start  # index of the last token in this chunk
        number = jnp.arange(tokens.shape[1])
        hidden_BTD, cache, _ = model.apply(params, tokens, cfg, valid=number <= at, cache=cache, **source)
        if mtp_cache is not None:
            _, mtp_cache, _ = model.after_next(params, hidden_BTD, following, cfg, valid=number < at, cache=mtp_cache)
        here = jnp.clip(at, 0, tokens.shape[1] - 1)[..., None]
        last_BD = jnp.take_along_axis(hidden_BTD, here, axis=1)[:, 0]
        return last_BD, (at >= 0) & (at < tokens.shape[1]), (cache, mtp_cache)

    following = jnp.pad(prompts[:, 1:], ((0, 0), (0, 1)))
    if length <= chunk:
        last_BD, _, caches = read((cache, mtp_cache), 0, prompts, following, **source)
        return last_BD, *caches
    chunks, following = (
        jnp.pad(x, ((0, 0), (0, -length % chunk))).reshape(batch, -1, chunk).swapaxes(0, 1) for x in (prompts, following)
    )
    last_BD, _, caches = read((cache, mtp_cache), 0, chunks[0], following[0], **source)

    def step(carry, x):
        last_BD, caches = carry
        chunk_BD, here, caches = read(caches, *x)
        return (jnp.where(here, chunk_BD, last_BD), caches), None

    starts = jnp.arange(chunk, len(chunks) * chunk, chunk)
    last_BD, caches = jax.lax.scan(step, (last_BD, caches), (starts, chunks[1:], following[1:]))[0]
    return last_BD, *caches


def copied(batch: int, request: Request) -> jax.Array:
    """The prompt that each row continues, [batch · copies]."""
    return jnp.repeat(jnp.arange(batch), request.copies)


def read(params, inputs: Inputs, request: Request, mtp_cache: Cache | None = None) -> tuple[jax.Array, Cache, Cache | None]:
    """``prefill`` of the prompts, once each, for all rows that continue them: [B·copies, D] and the caches."""
    batch, cfg = len(inputs.prompts), request.cfg
    cache = empty(spec(cfg, batch, request.cache_length, request.cache_dtype, request.ahead), cfg)
    chunk, source = request.prefill_chunk, inputs.source
    last_BD, cache, mtp_cache = prefill(params, inputs.prompts, inputs.lengths, cache, cfg, chunk, mtp_cache, **source)
    if request.copies > 1:
        row = copied(batch, request)
        last_BD, cache, mtp_cache = last_BD[row], cache.take(row), None if mtp_cache is None else mtp_cache.take(row)
    return last_BD, cache, mtp_cache


def start(params, inputs: Inputs, request: Request) -> tuple[State, Emitted]:
    """Reads the prompts and chooses each row's first token."""
    last_BD, cache, _ = read(params, inputs, request)
    return begin(params, last_BD, cache, inputs, request)


def begin(params, last_BD, cache: Cache, inputs: Inputs, request: Request) -> tuple[State, Emitted]:
    """Each row's first token, after the prompts have been read."""
    rows, key = len(last_BD), inputs.key
    state = State(
        cache=cache,
        token=jnp.zeros(rows, jnp.int32),
        done=jnp.zeros(rows, bool),
        new=jnp.zeros(rows, jnp.int32),
        keys=key if key.ndim else jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows)),
        history=_history(inputs, request) if request.methods.remembers else None,
    )
    return emit(params, last_BD, state, inputs.values, request)


def _history(inputs: Inputs, request: Request) -> History:
    prompts, lengths, vocab = inputs.prompts, inputs.lengths, request.cfg.vocab_size
    tokens = jnp.where(jnp.arange(prompts.shape[1]) < lengths[:, None], prompts, vocab)  # padding is out of range: dropped
    seen = jnp.zeros((len(prompts), vocab), bool).at[jnp.arange(len(prompts))[:, None], tokens].set(True, mode="drop")
    seen = seen[copied(len(prompts), request)]
    return History(seen, jnp.zeros(seen.shape, jnp.int32))


def emit(params, last_BD, state: State, values, request: Request) -> tuple[State, Emitted]:
    """Chooses a token for every row that has not ended."""
    logits = model.head(params, last_BD[:, None], request.cfg)[:, 0]
    shaped = shape(logits, request.methods, values, state.history, state.new, request.eos)
    chosen = choose(shaped, request.methods, jax.vmap(jax.random.fold_in)(state.keys, state.new))
    alive = ~state.done
    token = jnp.where(alive, chosen, request.pad)
    reported = report(logits, shaped, token, request)
    out = Emitted(
        token=token,
        logprob=jnp.where(alive, reported.logprob, 0.0),
        alive=alive,
        top_tokens=jnp.where(alive[:, None], reported.top_tokens, request.pad),
        top_logprobs=jnp.where(alive[:, None], reported.top_logprobs, 0.0),
    )
    return advance(state, token, request), out


def report(logits, shaped, token, request: Request) -> Emitted:
    """The probabilities of ``token`` [...], chosen by ``shaped`` of the model's ``logits`` [..., V]. Where no token could be
    chosen (all are −inf or NaN), the token's log-probability is NaN."""
    total = jax.nn.logsumexp(logits, axis=-1)
    logprob = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0] - total
    logprob = jnp.where(jnp.isfinite(shaped.max(-1)), logprob, jnp.nan)
    top_logits, top_tokens = jax.lax.top_k(logits, request.top_logprobs)
    return Emitted(token, logprob, jnp.ones(token.shape, bool), top_tokens, top_logits - total[..., None])


def advance(state: State, token, request: Request) -> State:
    """The state after ``token`` [B] of the rows that had not ended."""
    alive = ~state.done
    new = state.new + alive
    history = state.history
    if history is not None:
        counts = history.counts.at[jnp.arange(len(token)), token].add(alive.astype(jnp.int32))
        history = dataclasses.replace(history, counts=counts)
    done = state.done | (new >= request.max_new_tokens)
    if request.eos:
        done = done | jnp.isin(token, jnp.array(request.eos))
    return dataclasses.replace(state, token=token, done=done, new=new, history=history)


def step(params, state: State, values, request: Request) -> tuple[State, Emitted]:
    """Reads each row's last token and chooses its next."""
    fed = ~state.done[:, None]
    hidden_BTD, cache, _ = model.apply(params, state.token[:, None], request.cfg, valid=fed, cache=state.cache)
    return emit(params, hidden_BTD[:, 0], dataclasses.replace(state, cache=cache), values, request)


def block(params, state: State, values, request: Request, steps: int) -> tuple[State, Emitted]:
    """``steps`` steps: a ``lax.scan``. What they emit is stacked on a leading axis."""
    return jax.lax.scan(lambda state, _: step(params, state, values, request), state, None, length=steps)


def silence(first: Emitted, request: Request, axis: int, steps: int) -> Emitted:
    """What rows that have ended emit in ``steps`` steps, along a new axis."""
    silent = jax.tree.map(lambda x: jnp.zeros((*x.shape[:axis], steps, *x.shape[axis:]), x.dtype), first)
    return dataclasses.replace(silent, token=silent.token + request.pad, top_tokens=silent.top_tokens + request.pad)


def run(params, state: State, first: Emitted, values, request: Request) -> Emitted:
    """All tokens, ``first`` and those of blocks of steps until every row has ended: [max_new_tokens, B] each."""
    steps = request.max_new_tokens - 1
    blocks = -(-steps // BLOCK) if request.eos else 1
    size = -(-steps // max(blocks, 1))
    out = silence(first, request, 0, blocks * size)
    if steps:
        if blocks == 1:
            _, out = block(params, state, values, request, steps)
        else:
            out = _until_done(params, state, out, values, request, blocks, size)
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b])[: request.max_new_tokens], first, out)


def _until_done(params, state, out, values, request, blocks: int, size: int) -> Emitted:
    def unfinished(carry):
        number, state, _ = carry
        return (number < blocks) & ~state.done.all()

    def more(carry):
        number, state, out = carry
        state, emitted = block(params, state, values, request, size)
        put = lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, number * size, axis=0)
        return number + 1, state, jax.tree.map(put, out, emitted)

    return jax.lax.while_loop(unfinished, more, (jnp.zeros((), jnp.int32), state, out))[2]
