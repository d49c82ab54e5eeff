"""Attention on NVIDIA GPUs: cuDNN's flash attention (Dao 2023), through ``jax.nn.dot_product_attention``."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxformer import target
from jaxformer.nn.mask import Places, visible


def apply(q_BKGTH, k_BKSH, v_BKSH, places: Places, key_places: Places, site: Any, scale: float) -> jax.Array:
    """[B, K, G, T, H], of a ``kernels.Site`` within the kernel's limits.

    Causality and windows are cuDNN's own; segments and padding are a mask [B, T, S], the same for all heads. Where there is no
    GPU, JAX computes the same call by XLA.
    """
    mask_BTS = visible(places, key_places, causal=False)
    blind_BT = None
    if site.padding and mask_BTS is not None:
        # A query that sees no key would get the mean of what is hidden: it is let to see all, as its result is then dropped.
        seen_BTS = visible(places, key_places, causal=site.causal)
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
        is_causal=site.causal,
        local_window_size=None if site.window is None else (site.window - 1, 0),
        implementation="cudnn" if target.platform() == "gpu" else "xla",
    )
    out = jnp.moveaxis(mixed, 2, 1).reshape(*q_BKGTH.shape[:-1], v_BKSH.shape[-1])
    return out if blind_BT is None else jnp.where(blind_BT[:, None, None, :, None], 0, out)
