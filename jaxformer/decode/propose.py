"""Guesses of speculative decoding, inside jit: drawn from a draft model or from the model's ``mtp`` block, or looked up."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.config import ModelConfig
from jaxformer.decode import loop
from jaxformer.decode.choose import choose, shape
from jaxformer.decode.drafts import DraftModel, MultiToken, PromptLookup
from jaxformer.decode.loop import State
from jaxformer.decode.request import Inputs, Request
from jaxformer.nn import model, mtp
from jaxformer.nn.cache import Cache
from jaxformer.nn.cache_spec import empty, spec


@struct.dataclass
class Unread:
    """The tokens that a draft is to read next, after those in its cache."""

    cache: Cache
    tokens: Any
    """int32 [B, ahead + 1]"""
    count: Any
    """int32 [B]: how many of ``tokens`` there are."""
    hidden: Any
    """[B, ahead + 1, D]: what the head read when it chose each token, for the model's ``mtp`` block; else None."""


def mtp_cache(request: Request, rows: int) -> Cache | None:
    """An empty cache of the model's ``mtp`` block, where that is the draft: the block reads along with the prompts."""
    if not isinstance(request.draft, MultiToken):
        return None
    cfg = mtp.config(request.cfg)
    return empty(spec(cfg, rows, request.cache_length, request.cache_dtype, request.ahead), cfg)


def start(params: dict, inputs: Inputs, request: Request, mtp_cache: Cache | None, last_BD, token) -> Unread | None:
    """What the draft is to read after the prompts: each row's first ``token`` [B·copies]. None for a look-up.

    params: the draft's; mtp_cache: of the model's ``mtp`` block, which has read the prompts; last_BD: what the head read then.
    """
    draft, padding, cache, hidden_BTD = request.draft, ((0, 0), (0, request.ahead)), mtp_cache, None
    if isinstance(draft, PromptLookup):
        return None
    if isinstance(draft, DraftModel):
        batch = len(inputs.prompts)
        cache = empty(spec(draft.cfg, batch, request.cache_length, request.cache_dtype, request.ahead), draft.cfg)
        source = inputs.source if draft.cfg.encoder_layers else {}
        _, cache, _ = loop.prefill(params, inputs.prompts, inputs.lengths, cache, draft.cfg, request.prefill_chunk, **source)
        cache = cache.take(loop.copied(batch, request))
    else:
        hidden_BTD = jnp.pad(last_BD[:, None], (*padding, (0, 0)))
    assert cache is not None
    return Unread(cache, jnp.pad(token[:, None], padding), jnp.ones(len(token), jnp.int32), hidden_BTD)


def draw(params, unread: Unread, state: State, keys, values, request: Request) -> tuple[jax.Array, jax.Array, Cache]:
    """Guesses [B, ahead], the logits [ahead, B, V] that they were drawn from, and the cache, which has read ``unread``."""
    draft, methods, fed = request.draft, request.methods, ~state.done[:, None]
    cfg = draft.cfg if isinstance(draft, DraftModel) else request.cfg

    def read(tokens, hidden_BTD, valid, cache):
        if isinstance(draft, DraftModel):
            return read_guesses(params, tokens, valid, cache, cfg)
        out = model.after_next(params, hidden_BTD, tokens, cfg, valid=valid, cache=cache)
        return out.hidden, out.cache

    def guess(state, hidden_BTD, number):
        logits = model.head(params, hidden_BTD, cfg)[:, 0]
        shaped = shape(logits, methods, values, state.history, state.new, request.eos)
        token = choose(shaped, methods, jax.vmap(lambda key: jax.random.fold_in(key, number))(keys))
        # An end token among the guesses ends nothing yet.
        return dataclasses.replace(loop.advance(state, token, request), done=state.done), shaped

    def step(carry, number):
        guessed, hidden_BTD, cache = carry
        hidden_BTD, cache = read(guessed.token[:, None], hidden_BTD, fed, cache)
        guessed, shaped = guess(guessed, hidden_BTD, number)
        return (guessed, hidden_BTD, cache), (guessed.token, shaped)

    valid = (jnp.arange(unread.tokens.shape[1]) < unread.count[:, None]) & fed
    hidden_BTD, cache = read(unread.tokens, unread.hidden, valid, unread.cache)
    settled = cache.used
    last = jnp.maximum(unread.count - 1, 0)[:, None, None]
    hidden_BTD = jnp.take_along_axis(hidden_BTD, last, axis=1)
    first, shaped = guess(dataclasses.replace(state, cache=None), hidden_BTD, 0)
    carry, (tokens, later) = jax.lax.scan(step, (first, hidden_BTD, cache), jnp.arange(1, request.ahead))
    tokens, shaped = (jnp.concatenate([x[None], xs]) for x, xs in ((first.token, tokens), (shaped, later)))
    return tokens.T, shaped, carry[2].rewind(settled)


def read_guesses(params, tokens, valid, cache: Cache, cfg: ModelConfig) -> tuple[jax.Array, Cache]:
    """What the head reads of a chunk of guesses [B, T], and the cache that holds them. Guesses past a learned table are never
    kept; they read its last row."""
    at = jnp.minimum(cache.used[:, None] + jnp.arange(tokens.shape[1]), cfg.max_length - 1)
    positions = at if "learned" in cfg.positions else None
    out = model.apply(params, tokens, cfg, positions=positions, valid=valid, cache=cache)
    assert out.cache is not None
    return out.hidden, out.cache


def look_up(text: jax.Array, length: jax.Array, draft: PromptLookup) -> tuple[jax.Array, jax.Array]:
    """Guesses [B, ahead] that follow the latest of the longest earlier matches of the end of ``text`` [B, S], of ``length``
    [B]; and how many guesses there are, [B]."""
    width = text.shape[1]
    at = jnp.arange(width, dtype=jnp.int32)
    alike = jnp.ones(text.shape, bool)
    match = jnp.zeros(text.shape, jnp.int32)
    for back in range(draft.ngram):  # text[j − back] against the text's end
        end = jnp.take_along_axis(text, jnp.maximum(length[:, None] - 1 - back, 0), axis=1)
        alike = alike & (jnp.roll(text, back, axis=1) == end) & (at >= back) & (length[:, None] > back)
        match = match + alike
    match = jnp.where(at < length[:, None] - 1, match, 0)  # the end itself is no match
    best = (match * width + at).argmax(1).astype(jnp.int32)
    guesses = jnp.take_along_axis(text, jnp.minimum(best[:, None] + 1 + jnp.arange(draft.ahead), width - 1), axis=1)
    return guesses, jnp.where(match.max(1) > 0, jnp.minimum(draft.ahead, length - 1 - best), 0)
