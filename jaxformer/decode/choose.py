"""A token is chosen from logits, inside jit, by the methods of ``Sampling``, per row.

The order is: repetition, presence and frequency penalties; bias and bans; minimum length; the user's function; temperature;
top-k; top-p; min-p; typical. Each works on what those before it have left.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.decode.sampling import Methods


@struct.dataclass
class History:
    """What a row has seen; None where no method asks for it."""

    prompt: Any
    """bool [B, V]: tokens of the prompt."""
    counts: Any
    """int32 [B, V]: how often each was generated."""


def choose(logits: jax.Array, methods: Methods, keys: jax.Array) -> jax.Array:
    """Token ids [B] drawn from the logits [B, V] that ``shape`` gives, each row with its own key [B]."""
    if methods.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))(keys)
    return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)


def shape(logits: jax.Array, methods: Methods, values: dict, history: History | None, new: jax.Array, eos: tuple) -> jax.Array:
    """Logits [B, V] of the distribution that a token is drawn from, −inf where it cannot be. Where only some rows are greedy,
    those keep one token.

    values: as ``compile_sampling`` gives them; new [B]: tokens generated so far; eos: ids that ``min_new_tokens`` holds back.
    """
    if methods.remembers:
        assert history is not None
        logits = _penalised(logits, methods, values, history)
    if "bias" in methods.names:
        logits = logits + values["bias"]
    if "min_new_tokens" in methods.names and eos:
        early = new[:, None] < values["min_new_tokens"]
        ends = jnp.isin(jnp.arange(logits.shape[-1]), jnp.array(eos))
        logits = jnp.where(early & ends, -jnp.inf, logits)
    for number, transform in enumerate(methods.transforms):
        changed = transform(logits)
        if getattr(changed, "shape", None) != logits.shape:
            raise ValueError(f"transform must return an array like its logits, of shape {logits.shape}, not {changed!r:.80}")
        logits = jnp.where(values["transform"] == number, changed.astype(jnp.float32), logits)
    if methods.greedy:
        return logits
    greedy = values["temperature"] == 0
    temperature = jnp.where(greedy, 1.0, values["temperature"])
    best_logit = logits.max(-1, keepdims=True)
    # A tiny temperature may overflow, but towards −inf only.
    offset = jnp.where(jnp.isfinite(best_logit / temperature), 0.0, best_logit)
    drawn = narrow((logits - offset) / temperature, methods, values)
    best = jnp.arange(logits.shape[-1]) == jnp.argmax(logits, axis=-1)[:, None]
    return jnp.where(greedy, jnp.where(best, 0.0, -jnp.inf), drawn)


def _penalised(logits, methods, values, history):
    counts = history.counts.astype(jnp.float32)
    if "repetition_penalty" in methods.names:
        penalty = values["repetition_penalty"]
        seen = history.prompt | (history.counts > 0)
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    return logits - values["presence_penalty"] * (counts > 0) - values["frequency_penalty"] * counts


def narrow(logits: jax.Array, methods: Methods, values: dict) -> jax.Array:
    """Logits [B, V] with −inf where top-k, top-p, min-p or typical sampling leaves a token out."""
    names = methods.names
    if "top_k" in names:
        limit = jnp.where(values["top_k"] == 0, jnp.inf, values["top_k"])
        logits = jnp.where(leading(logits, jnp.ones_like(logits), limit), logits, -jnp.inf)
    if "top_p" in names:
        logits = jnp.where(leading(logits, jax.nn.softmax(logits), _mass(values["top_p"])), logits, -jnp.inf)
    if "min_p" in names:
        least = logits.max(-1, keepdims=True) + jnp.log(values["min_p"])
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if "typical_p" in names:
        logp = jax.nn.log_softmax(logits)
        p = jnp.exp(logp)
        entropy = -jnp.where(p > 0, p * logp, 0.0).sum(-1, keepdims=True)
        nearness = jnp.where(p > 0, -jnp.abs(-logp - entropy), -jnp.inf)
        logits = jnp.where(leading(nearness, p, _mass(values["typical_p"])), logits, -jnp.inf)
    return logits


def _mass(p: jax.Array) -> jax.Array:
    # p = 1 keeps everything: rounding of a sum must not drop the tail. p = 0 keeps the first: nothing stands before it.
    return jnp.where(p >= 1, jnp.inf, jnp.maximum(p, jnp.finfo(jnp.float32).tiny))


def leading(score: jax.Array, weight: jax.Array, limit: jax.Array) -> jax.Array:
    """[B, V], True for the entries of highest score, lowest index first among equals, as long as the weight of those before
    is below limit [B, 1].

    The score at which that ends is found by bisection over the bits of a float, 32 sums over V, where a sort of V would take
    many times as long.
    """
    score = jnp.where(score == 0, 0.0, score.astype(jnp.float32))  # one zero: −0 has other bits
    bits = jax.lax.bitcast_convert_type(score, jnp.int32)
    rank = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)  # integers in the order of the floats

    def above(threshold):
        return jnp.where(rank > threshold, weight, 0.0).sum(-1, keepdims=True)

    def halve(_, ends):
        low, high = ends
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        enough = above(middle) < limit
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    ends = (jnp.full_like(rank[:, :1], -(2**31)), rank.max(-1, keepdims=True))
    _, threshold = jax.lax.fori_loop(0, 32, halve, ends)
    tied = jnp.where(rank == threshold, weight, 0.0)
    before = above(threshold) + jnp.cumsum(tied, axis=-1) - tied
    return (rank > threshold) | ((rank == threshold) & (before < limit))
