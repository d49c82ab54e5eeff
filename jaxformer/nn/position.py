"""Where a token stands. A position component acts at one of three sites, which its attribute ``site`` names:

* ``"input"``: ``apply(params, x_BTD, positions_BT, cfg) -> x_BTD``, on the embeddings (sinusoidal, learned);
* ``"heads"``: ``apply(params, x, positions_BT, cfg) -> x`` on queries ``[B,K,G,T,H]`` and keys ``[B,K,S,H]`` (RoPE);
* ``"scores"``: ``apply(params, (query_positions_BT, key_positions_BS), cfg) -> bias``, added to the scaled scores and
  broadcast against ``[B,K,G,T,S]`` (ALiBi and other relative biases).

Positions, frequencies, angles, sines and cosines are float32 in a model of any dtype: bfloat16 cannot tell 256 from 257.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.config.components import Component, resolve
from jaxformer.config.spec import Param, normal, with_sizes
from jaxformer.nn import rope


def spec(cfg: ModelConfig) -> dict:
    """Parameters of ``cfg.position``."""
    return _component(cfg).spec(cfg)


def site(cfg: ModelConfig) -> str:
    """Where ``cfg.position`` acts: input, heads or scores."""
    return getattr(_component(cfg), "site", "input")


def apply(params: dict, x, *args) -> jax.Array:
    """``apply(params, x, positions, cfg)``, or ``apply(params, (q_positions, k_positions), cfg)`` for a score bias."""
    return _component(args[-1]).apply(params, x, *args)


def stack_spec(cfg: ModelConfig) -> dict:
    """Parameters that the layers of a stack share. Raises ValueError where layers differ in a component that acts on the
    input, which all of them read, or where more than one component has parameters."""
    layers = list({layer.position: layer for layer in cfg.layers}.values())
    if len(layers) > 1:
        for layer in layers:
            if layer.position != "none" and site(layer) == "input":
                raise ValueError(
                    f"position={layer.position!r} acts on the input of the first layer, and cannot be chosen by layer"
                )
    specs = [params for layer in layers if (params := with_sizes(spec(layer), layer.component_sizes))]
    if len(specs) > 1:
        raise ValueError("position by layer may name one component with parameters, not several")
    return specs[0] if specs else {}


def on_input(params: dict, x_BTD: jax.Array, positions_BT: jax.Array, cfg: ModelConfig) -> jax.Array:
    """What a stack reads: ``x_BTD`` with its positions, where ``cfg.position`` acts on the input."""
    layer = cfg.layers[0]
    if len(cfg.positions) > 1 or site(layer) != "input":
        return x_BTD
    return apply(params, x_BTD, positions_BT, layer)


def _component(cfg: ModelConfig):
    return resolve("position", cfg.position, CHOICES)


def angles(positions: jax.Array, width: int, theta: float) -> jax.Array:
    """``p · theta^(−2i/width)`` for i < width/2: [...] -> [..., width/2], float32."""
    frequency = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    return positions.astype(jnp.float32)[..., None] * frequency


def sinusoids(positions: jax.Array, width: int) -> jax.Array:
    """``PE[p, 2i] = sin(p / 10000^(2i/width))``, ``PE[p, 2i+1] = cos(same)`` (Vaswani et al. 2017, 3.5).

    positions [...]; result [..., width], float32.
    """
    angle = angles(positions, width, 10_000.0)
    return jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(*positions.shape, width)


def _no_spec(cfg):
    return {}


def _sinusoidal_apply(params, x_BTD, positions_BT, cfg):
    return x_BTD + sinusoids(positions_BT, cfg.d_model).astype(x_BTD.dtype)


def _learned_spec(cfg):
    return {"table": Param("PD", normal(cfg.init_std), sizes=(("P", cfg.position_offset + cfg.max_length),))}


def _learned_apply(params, x_BTD, positions_BT, cfg):
    # A position outside the table is an error where it can be seen (nn.inputs); inside jit it cannot be, and turns the
    # row into NaN: indexing would silently repeat the last one.
    rows = jnp.asarray(params["table"], x_BTD.dtype)
    inside = (positions_BT >= 0) & (positions_BT < rows.shape[0] - cfg.position_offset)
    return x_BTD + jnp.where(inside[..., None], rows.at[positions_BT + cfg.position_offset].get(mode="clip"), jnp.nan)


def half_sinusoids(positions: jax.Array, width: int) -> jax.Array:
    """``sinusoids``, all sines before all cosines."""
    angle = angles(positions, width, 10_000.0)
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def _sinusoidal_half_apply(params, x_BTD, positions_BT, cfg):
    return x_BTD + half_sinusoids(positions_BT, cfg.d_model).astype(x_BTD.dtype)


def buckets(distance: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Bucket of each distance key − query (Raffel et al. 2020): half of them one a distance, the other half growing with its
    logarithm up to ``cfg.relative_distance``; without causality, half of all for keys behind and half for those ahead."""
    number = cfg.relative_buckets if cfg.causal else cfg.relative_buckets // 2
    ahead = 0 if cfg.causal else number * (distance > 0)
    far = jnp.maximum(-distance, 0) if cfg.causal else jnp.abs(distance)
    beyond = jnp.searchsorted(jnp.asarray(_edges(number, cfg.relative_distance)), far, side="right")
    return ahead + jnp.where(far < number // 2, far, number // 2 + beyond)


@functools.cache
def _edges(number: int, distance: int) -> np.ndarray:
    """The distances at which the logarithmic buckets after the first begin: where log(d/e) / log(distance/e) reaches k/m, for
    e exact and m other buckets. In integers, d^m >= e^(m−k)·distance^k: floats would put some of them on the wrong side."""
    exact = number // 2
    rest = number - exact

    def reached(d, k):
        return d**rest >= exact ** (rest - k) * distance**k

    edges = []
    for k in range(1, rest):
        low, high = exact, distance
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if reached(middle, k) else (middle + 1, high)
        edges.append(low)
    return np.array(edges, np.int32)


def _relative_spec(cfg):
    return {"table": Param("PKG", normal(cfg.init_std), sizes=(("P", cfg.relative_buckets),))}


def _relative_apply(params, positions, cfg):
    query_BT, key_BS = positions
    bucket_BTS = buckets(key_BS[:, None, :] - query_BT[:, :, None], cfg)
    table_PKG = jnp.asarray(params["table"], jnp.float32)
    return jnp.moveaxis(table_PKG[bucket_BTS], (-2, -1), (1, 2))  # [B, K, G, T, S]


CHOICES = {
    "none": Component(_no_spec, lambda params, x, positions, cfg: x),
    "sinusoidal": Component(_no_spec, _sinusoidal_apply),
    "sinusoidal_half": Component(_no_spec, _sinusoidal_half_apply),
    "learned": Component(_learned_spec, _learned_apply),
    "rope": Component(_no_spec, rope.apply, site="heads"),
    "relative": Component(_relative_spec, _relative_apply, site="scores"),
}
