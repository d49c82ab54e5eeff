"""softmax(q kᵀ / sqrt(H) + M) v: the one attention function, which every attention component calls.

``mix`` takes the device's kernel where it can serve the call; ``attend`` is the function itself, by plain XLA.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxformer.config import ModelConfig
from jaxformer.nn.kernels import cudnn, select, splash
from jaxformer.nn.kernels.call import AttentionCall
from jaxformer.nn.mask import TokenInfo, visible
from jaxformer.nn.named import label, multiply
from jaxformer.parallel.sharding import ACTIVATIONS, current, partition_spec, partitioned, platform


def mix(
    q_BKGTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    info: TokenInfo,
    key_info: TokenInfo,
    cfg: ModelConfig,
    *,
    crossing: bool = False,
    scale: float | None = None,
    bias: jax.Array | None = None,
    dropout: bool = False,
    observe: Callable[[jax.Array], jax.Array] = lambda weights: weights,
) -> jax.Array:
    """Attention of queries and keys that stand where ``info`` and ``key_info`` say, by the kernel that ``select.choose``
    gives: [B, K, G, T, H], which rematerialisation knows as "mixed".

    crossing: every key is visible but padding. dropout: whether ``observe``, which is applied to the weights, drops some. The
    other arguments are those of ``attend``.
    """
    causal, window = (False, None) if crossing else (cfg.causal, cfg.window)
    assert not isinstance(window, tuple)  # cfg is the config of one layer
    mesh = current()
    axes = (None,) * 5 if mesh is None else partition_spec("BKGTH", q_BKGTH.shape, ACTIVATIONS, mesh)
    _, key_axis, group_axis, time_axis, _ = axes
    call = AttentionCall(
        q_BKGTH.shape[3],
        k_BKSH.shape[2],
        k_BKSH.shape[3],
        v_BKSH.shape[3],
        q_BKGTH.dtype.name,
        causal,
        window,
        cfg.attention_softcap,
        bias=bias is not None,
        dropout=dropout,
        padding=key_info.valid is not None,
        segments=info.segment is not None and key_info.segment is not None,
        ordered=info.ordered and key_info.ordered,
        shards=1 if mesh is None or time_axis is None else mesh.shape[time_axis],
        heads_apart=group_axis is not None and key_axis is None,
        unplaced=platform() == "tpu" and mesh is None and partitioned(),
    )
    kernel = select.choose(cfg, call)
    if kernel == "xla":
        mask_BTS = visible(info, key_info, causal=causal, window=window)
        softcap, cached = cfg.attention_softcap, not call.ordered
        how: dict[str, Any] = {"scale": scale, "softcap": softcap, "bias": bias, "observe": observe, "cached": cached}
        mixed = attend(q_BKGTH, k_BKSH, v_BKSH, mask_BTS, **how)
        return checkpoint_name(mixed, label("mixed"))
    scale = q_BKGTH.shape[-1] ** -0.5 if scale is None else scale
    if kernel == "cudnn":
        return checkpoint_name(cudnn.apply(q_BKGTH, k_BKSH, v_BKSH, info, key_info, call, scale), label("mixed"))
    return splash.apply(q_BKGTH, k_BKSH, v_BKSH, info, key_info, call, scale)  # which labels what it keeps itself


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
    cached: bool = False,
) -> jax.Array:
    """Scaled dot-product attention (Vaswani et al. 2017, eq. 1), softmax in float32: [B, K, G, T, H].

    mask_BTS [1 or B, T, S], True where the query sees the key; scale: 1/sqrt(H) unless given; bias broadcasts against
    [B, K, G, T, S]; ``observe`` is applied to the weights; cached: keys and values that a query does not see may be
    anything, NaN too. A query that sees no key gives exactly zero, and finite gradients.
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
    if cached and mask_BTS is not None:
        return _mixed_of_seen(weights_BKGTS, v_BKSH, mask_BTS)
    return multiply("BKGTS,BKSH->BKGTH", weights_BKGTS, v_BKSH, name="mixed")


def _mixed_of_seen(weights_BKGTS: jax.Array, v_BKSH: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """The mix of the values that each query sees, whatever the others are: their weights are 0, but 0 · NaN is NaN.

    Of several queries, one that does see a value that is not finite has NaN in that place.
    """
    mix = functools.partial(jnp.einsum, "BKGTS,BKSH->BKGTH", weights_BKGTS)
    selected = lambda: mix(jnp.where(mask_BTS[:, :1, :, None], v_BKSH, 0))  # for one query
    is_step = weights_BKGTS.shape[3] == 1
    by = (lambda *_: selected()) if is_step and platform() != "cpu" else None  # fused there; CPUs write a copy of all values
    mixed_BKGTH = multiply("BKGTS,BKSH->BKGTH", weights_BKGTS, v_BKSH, name="mixed", by=by)
    if by is not None:
        return mixed_BKGTH

    def carefully():
        finite_BKSH = jnp.isfinite(v_BKSH)
        seen_BKTH = jnp.matmul(mask_BTS[:, None].astype(jnp.float32), 1.0 - finite_BKSH)
        return jnp.where(seen_BKTH[:, :, None] > 0, jnp.nan, mix(jnp.where(finite_BKSH, v_BKSH, 0)))

    return jax.lax.cond(jnp.isfinite(mixed_BKGTH).all(), lambda: mixed_BKGTH, selected if is_step else carefully)


def _scores(q_BKGTH: jax.Array, k_BKSH: jax.Array) -> jax.Array:
    """q·k in float32, [B, K, G, T, S]."""
    if q_BKGTH.shape[3] > 1:
        return jnp.einsum("BKGTH,BKSH->BKGTS", q_BKGTH, k_BKSH, preferred_element_type=jnp.float32)
    # One query: keys come first, because CPUs transpose a second operand, which would copy all the cache's keys.
    scores_BKSGT = jax.lax.dot_general(k_BKSH, q_BKGTH, (((3,), (4,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
    return jnp.moveaxis(scores_BKSGT, 2, -1)


@jax.custom_jvp
def _masked_softmax(scores: jax.Array, mask: jax.Array | bool) -> jax.Array:
    # Hidden keys are −inf once, after all else. A row with none visible has maximum −inf and sum 0: both are replaced, so
    # that its weights are exp(−inf) / 1 = 0 and no −inf − −inf or 0 / 0 arises.
    scores = jnp.where(mask, scores, -jnp.inf)
    top = scores.max(-1, keepdims=True)
    unscaled = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
    total = unscaled.sum(-1, keepdims=True)
    return unscaled / jnp.where(total == 0.0, 1.0, total)


@_masked_softmax.defjvp
def _masked_softmax_jvp(primals, tangents):
    # By hand, because the weights are then all that the backward pass keeps.
    weights, (_, mask) = _masked_softmax(*primals), primals
    product = weights * jnp.where(mask, tangents[0], 0.0)
    return weights, product - weights * product.sum(-1, keepdims=True)
