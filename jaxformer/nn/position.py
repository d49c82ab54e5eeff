"""Where a token stands. A position component acts at one of three sites, which its attribute ``site`` names:

* ``"input"``: ``apply(params, x_BTD, positions_BT, cfg) -> x_BTD``, on the embeddings (sinusoidal, learned);
* ``"heads"``: ``apply(params, x, positions_BT, cfg) -> x`` on queries ``[B,K,G,T,H]`` and keys ``[B,K,S,H]`` (RoPE);
* ``"scores"``: ``apply(params, (query_positions_BT, key_positions_BS), cfg) -> bias``, added to the scaled scores and
  broadcast against ``[B,K,G,T,S]`` (ALiBi and other relative biases).

Positions, frequencies, angles, sines and cosines are float32 in a model of any dtype: bfloat16 cannot tell 256 from 257.
"""

import jax
import jax.numpy as jnp

from jaxformer.component import Component, resolve
from jaxformer.config import ModelConfig
from jaxformer.spec import Param, normal


def spec(cfg: ModelConfig) -> dict:
    """Parameters of ``cfg.position``."""
    return resolve("position", cfg.position).spec(cfg)


def site(cfg: ModelConfig) -> str:
    """Where ``cfg.position`` acts: input, heads or scores."""
    return getattr(resolve("position", cfg.position), "site", "input")


def apply(params: dict, x, *args) -> jax.Array:
    """``apply(params, x, positions, cfg)``, or ``apply(params, (q_positions, k_positions), cfg)`` for a score bias."""
    return resolve("position", args[-1].position).apply(params, x, *args)


def sinusoids(positions: jax.Array, width: int) -> jax.Array:
    """``PE[p, 2i] = sin(p / 10000^(2i/width))``, ``PE[p, 2i+1] = cos(same)`` (Vaswani et al. 2017, 3.5).

    positions [...]; result [..., width], float32.
    """
    angle = angles(positions, width, 10_000.0)
    return jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(*positions.shape, width)


def angles(positions: jax.Array, width: int, theta: float) -> jax.Array:
    """``p · theta^(−2i/width)`` for i < width/2: [...] -> [..., width/2], float32."""
    frequency = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    return positions.astype(jnp.float32)[..., None] * frequency


def rotate(x: jax.Array, angle: jax.Array, layout: str) -> jax.Array:
    """Rotates each pair of the last axis by its angle (Su et al. 2021, eq. 34). Computes in float32, returns x's dtype.

    x [..., H]; angle [..., H/2], broadcast; layout "interleaved" pairs (2i, 2i+1), "half" pairs (i, i + H/2).
    """
    if layout not in ("interleaved", "half"):
        raise ValueError(f"layout={layout!r} must be 'interleaved' or 'half'")
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x32 = x.astype(jnp.float32)
    a, b = jnp.split(x32, 2, axis=-1) if layout == "half" else (x32[..., 0::2], x32[..., 1::2])
    a, b = a * cos - b * sin, a * sin + b * cos
    if layout == "half":
        return jnp.concatenate([a, b], axis=-1).astype(x.dtype)
    return jnp.stack([a, b], axis=-1).reshape(*a.shape[:-1], x.shape[-1]).astype(x.dtype)


def _no_spec(cfg):
    return {}


def _sinusoidal_apply(params, x_BTD, positions_BT, cfg):
    return x_BTD + sinusoids(positions_BT, cfg.d_model).astype(x_BTD.dtype)


def _learned_spec(cfg):
    return {"table": Param("PD", normal(cfg.init_std))}


def _learned_apply(params, x_BTD, positions_BT, cfg):
    # A position outside the table is an error where it can be seen (nn.inputs); inside jit it cannot be, and turns the
    # row into NaN: indexing would silently repeat the last one.
    rows = jnp.asarray(params["table"], x_BTD.dtype)
    inside = (positions_BT >= 0) & (positions_BT < rows.shape[0])
    return x_BTD + jnp.where(inside[..., None], rows.at[positions_BT].get(mode="clip"), jnp.nan)


def _rope_apply(params, x, positions_BT, cfg):
    angle = angles(positions_BT, x.shape[-1], cfg.rope_theta)  # [B, T, H/2]
    between = tuple(range(1, x.ndim - 2))  # the head axes of [B, K, (G,) T, H]
    return rotate(x, jnp.expand_dims(angle, between), cfg.rope_layout)


CHOICES = {
    "none": Component(_no_spec, lambda params, x, positions, cfg: x),
    "sinusoidal": Component(_no_spec, _sinusoidal_apply),
    "learned": Component(_learned_spec, _learned_apply),
    "rope": Component(_no_spec, _rope_apply, site="heads"),
}
