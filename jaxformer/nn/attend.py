"""softmax(q kᵀ / sqrt(H) + M) v: the one attention function, which every attention component calls."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxformer.nn.named import multiply

Entries = dict[str, jax.Array]
"""What attention keeps of a sequence, by name."""


def attend(
    q_BKGTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    mask_BTS: jax.Array | None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: jax.Array | None = None,
    observe: Callable[[jax.Array], jax.Array] = lambda weights: weights,
) -> jax.Array:
    """Scaled dot-product attention (Vaswani et al. 2017, eq. 1), softmax in float32: [B, K, G, T, H].

    mask_BTS [1 or B, T, S], True where the query sees the key; scale: 1/sqrt(H) unless given; bias broadcasts against
    [B, K, G, T, S]; ``observe`` is applied to the weights. A query that sees no key gives exactly zero, and finite gradients.
    """
    scores = multiply("BKGTH,BKSH->BKGTS", q_BKGTH, k_BKSH, name="scores", by=_scores)
    scores = scores / q_BKGTH.shape[-1] ** 0.5 if scale is None else scores * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    if mask_BTS is None and bias is None:
        weights = jax.nn.softmax(scores)
    else:  # a bias may hide keys too, by −inf
        weights = _masked_softmax(scores, True if mask_BTS is None else mask_BTS[:, None, None])
    weights_BKGTS = observe(weights.astype(v_BKSH.dtype))
    return multiply("BKGTS,BKSH->BKGTH", weights_BKGTS, v_BKSH, name="mixed")


def _scores(q_BKGTH: jax.Array, k_BKSH: jax.Array) -> jax.Array:
    """q·k in float32, [B, K, G, T, S]."""
    if q_BKGTH.shape[3] > 1:
        return jnp.einsum("BKGTH,BKSH->BKGTS", q_BKGTH, k_BKSH, preferred_element_type=jnp.float32)
    # One query: keys come first, because CPUs transpose a second operand, which would copy all the cache's keys.
    scores_BKSGT = jax.lax.dot_general(k_BKSH, q_BKGTH, (((3,), (4,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
    return jnp.moveaxis(scores_BKSGT, 2, -1)


def _masked_softmax(scores: jax.Array, mask: jax.Array | bool) -> jax.Array:
    # Hidden keys are −inf once, after all else. A row with none visible has maximum −inf and sum 0: both are replaced, so
    # that its weights are exp(−inf) / 1 = 0 and no −inf − −inf or 0 / 0 arises, in the backward pass either.
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    unscaled = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
    total = unscaled.sum(-1, keepdims=True)
    return unscaled / jnp.where(total == 0.0, 1.0, total)
