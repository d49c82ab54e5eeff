"""Guesses of the model's own block for the token after the next (``nn.mtp``), for speculative decoding."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.config.strict import Strict, within
from jaxformer.decode import loop, sampling
from jaxformer.decode.loop import Plan, State
from jaxformer.nn import model, mtp
from jaxformer.nn.cache import Cache
from jaxformer.nn.cache_spec import empty, spec


@dataclass(frozen=True)
class MultiToken(Strict):
    """Guesses with the block of a model with ``mtp``; more than one token by putting its result in its place again."""

    ahead: int = 1
    """Tokens guessed at a time."""

    def __post_init__(self):
        super().__post_init__()
        within(self, 1, float("inf"), "ahead")


@struct.dataclass
class Pairs:
    """What the block is to read next: the last tokens, and what the head read when it chose them."""

    cache: Cache
    """Of the block: it has read all pairs before."""
    hidden: Any
    """[B, T, D]"""
    tokens: Any
    """int32 [B, T]"""
    count: Any
    """int32 [B]: how many of the T there are."""


def begin(plan: Plan, rows: int) -> Cache:
    """An empty cache of the block."""
    own = mtp.config(plan.cfg)
    return empty(spec(own, rows, plan.slots, plan.cache_dtype, plan.ahead), own)


def first(cache: Cache, last_BD: jax.Array, token: jax.Array, ahead: int) -> Pairs:
    """After the prompts: one pair a row."""
    hidden_BTD = jnp.pad(last_BD[:, None], ((0, 0), (0, ahead), (0, 0)))
    return Pairs(cache, hidden_BTD, jnp.pad(token[:, None], ((0, 0), (0, ahead))), jnp.ones(len(token), jnp.int32))


def draw(params, pairs: Pairs, state: State, keys, values, plan: Plan, ahead: int) -> tuple[jax.Array, jax.Array, Cache]:
    """Guesses [B, ahead], the logits [ahead, B, V] that they were drawn from, and the cache, which has read the pairs."""
    cfg, fed = plan.cfg, ~state.done[:, None]
    valid = (jnp.arange(pairs.tokens.shape[1]) < pairs.count[:, None]) & fed
    out_BTD, cache, _ = model.after_next(params, pairs.hidden, pairs.tokens, cfg, valid=valid, cache=pairs.cache)
    last = jnp.maximum(pairs.count - 1, 0)[:, None, None]
    hidden_BTD, kept = jnp.take_along_axis(out_BTD, last, axis=1), cache
    guessed, tokens, logits = state, [], []
    for number in range(ahead):
        raw = model.head(params, hidden_BTD, cfg)[:, 0]
        shaped = sampling.shape(raw, plan.methods, values, guessed.history, guessed.new, plan.eos)
        token = sampling.choose(shaped, plan.methods, jax.vmap(lambda key, n=number: jax.random.fold_in(key, n))(keys))
        tokens.append(token)
        logits.append(shaped)
        # An end token among the guesses ends nothing yet.
        guessed = dataclasses.replace(loop.advance(guessed, token, plan), done=state.done)
        if number + 1 < ahead:
            hidden_BTD, cache, _ = model.after_next(params, hidden_BTD, token[:, None], cfg, valid=fed, cache=cache)
    assert cache is not None and kept is not None
    return jnp.stack(tokens, axis=1), jnp.stack(logits), cache.rewind(kept.used)
