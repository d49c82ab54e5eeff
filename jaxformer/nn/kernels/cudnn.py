"""Attention on NVIDIA GPUs: cuDNN's flash attention (Dao 2023), through ``jax.nn.dot_product_attention``."""

import jax
import jax.numpy as jnp

from jaxformer.nn.kernels.call import AttentionCall
from jaxformer.nn.mask import TokenInfo, visible
from jaxformer.parallel.sharding import platform


def limit(call: AttentionCall) -> str | None:
    """Why cuDNN cannot serve a call; None where it can."""
    if not cudnn_is_there():
        return "runs only on NVIDIA GPUs"
    if call.bias or call.softcap is not None:
        return "adds no bias to the scores and caps none"
    if call.dropout:
        return "draws dropout of its own, which no other device could repeat"
    if call.dtype not in ("bfloat16", "float16"):
        return f"computes in bfloat16 and float16, not {call.dtype}"
    if call.key_width != call.value_width:
        return f"needs keys and values of one width, not {call.key_width} and {call.value_width}"
    if call.key_width % 8 or call.key_width > 128:
        return f"needs heads whose width divides by 8 and is at most 128, not {call.key_width}"
    if call.shards > 1:
        return f"has no part of a sequence on each of {call.shards} devices"
    if (call.padding or call.segments) and (call.queries % 2 or call.keys % 2):
        return f"needs even lengths where there is a mask, not {call.queries} queries and {call.keys} keys"
    if call.heads_apart:
        return "needs keys spread over devices as their queries are"
    if call.window is not None and not call.causal:
        return "knows windows of causal attention alone"
    return call.padded_window()


def cudnn_is_there() -> bool:
    """Whether JAX's devices are NVIDIA's, as far as it can be asked; elsewhere XLA computes the same call, for tests."""
    return platform() != "gpu" or "rocm" not in jax.devices()[0].client.platform_version.lower()


def apply(q_BKGTH, k_BKSH, v_BKSH, info: TokenInfo, key_info: TokenInfo, call: AttentionCall, scale: float) -> jax.Array:
    """[B, K, G, T, H], of a call within the kernel's limits.

    Causality and windows are cuDNN's own; segments and padding are a mask [B, T, S], the same for all heads. Where there is no
    GPU, JAX computes the same call by XLA.
    """
    mask_BTS = visible(info, key_info, causal=False)
    blind_BT = None
    if call.padding and mask_BTS is not None:
        # A query that sees no key would get the mean of what is hidden: it is let to see all, as its result is then dropped.
        seen_BTS = visible(info, key_info, causal=call.causal)
        assert seen_BTS is not None
        blind_BT = ~seen_BTS.any(-1)
        mask_BTS = mask_BTS | blind_BT[..., None]
    heads = jnp.moveaxis(q_BKGTH.reshape(q_BKGTH.shape[0], -1, *q_BKGTH.shape[3:]), 1, 2)  # [B, T, K·G, H]
    mixed = jax.nn.dot_product_attention(
        heads,
        jnp.swapaxes(k_BKSH, 1, 2),
        jnp.swapaxes(v_BKSH, 1, 2),
        mask=None if mask_BTS is None else jnp.broadcast_to(mask_BTS, (len(heads), *mask_BTS.shape[1:]))[:, None],
        scale=scale,
        is_causal=call.causal,
        local_window_size=None if call.window is None else (call.window - 1, 0),
        implementation="cudnn" if platform() == "gpu" else "xla",
    )
    out = jnp.moveaxis(mixed, 2, 1).reshape(*q_BKGTH.shape[:-1], v_BKSH.shape[-1])
    return out if blind_BT is None else jnp.where(blind_BT[:, None, None, :, None], 0, out)
