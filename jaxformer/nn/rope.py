"""Rotary positions (Su et al. 2021), and how their frequencies are stretched for longer sequences. All of it in float32."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig, RopeScaling
from jaxformer.parallel.sharding import platform


def apply(params: dict, x: jax.Array, positions_BT: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Queries [B, K, G, T, H] or keys [B, K, S, H], rotated to their positions."""
    width = cfg.rotary_dim
    angle = jnp.expand_dims(angles(positions_BT, width, cfg), tuple(range(1, x.ndim - 2)))  # the head axes of [B, K, (G,) T, H]
    rotated = rotate(x[..., :width], angle, cfg.rope_layout, attention_factor(cfg))
    return rotated if width == x.shape[-1] else jnp.concatenate([rotated, x[..., width:]], axis=-1)


def angles(positions_BT: jax.Array, width: int, cfg: ModelConfig) -> jax.Array:
    """Position times frequency, [B, T, width/2]."""
    frequency = frequencies(cfg, width, positions_BT.max(axis=1, keepdims=True) + 1)
    return positions_BT.astype(jnp.float32)[..., None] * frequency


def check_cache(cfg: ModelConfig, length: int) -> None:
    """Raises ValueError where a cache of ``length`` tokens could not hold what the forward of the whole sequence computes."""
    original = cfg.rope_scaling.original_length
    if "rope" in cfg.positions and cfg.rope_scaling.kind == "dynamic" and original is not None and length > original:
        raise ValueError(
            f"with rope_scaling of kind 'dynamic', every key changes as a sequence grows past original_length={original}: "
            f"a cache cannot hold {length} tokens. Use forward without a cache, or kind 'yarn'"
        )


def rotate(x: jax.Array, angle: jax.Array, layout: str, factor: float = 1.0) -> jax.Array:
    """Rotates each pair of the last axis by its angle (Su et al. 2021, eq. 34), times ``factor``. Computes in float32, returns
    x's dtype.

    x [..., H]; angle [..., H/2], broadcast; layout "interleaved" pairs (2i, 2i+1), "half" pairs (i, i + H/2).
    """
    if layout not in ("interleaved", "half"):
        raise ValueError(f"layout={layout!r} must be 'interleaved' or 'half'")
    cos, sin = factor * jnp.cos(angle), factor * jnp.sin(angle)
    x32 = x.astype(jnp.float32)
    if platform() == "tpu":
        return (x32 * _of_both(cos, layout) + _others(x, layout) * _of_both(sin, layout)).astype(x.dtype)
    a, b = jnp.split(x32, 2, axis=-1) if layout == "half" else (x32[..., 0::2], x32[..., 1::2])
    a, b = a * cos - b * sin, a * sin + b * cos
    if layout == "half":
        return jnp.concatenate([a, b], axis=-1).astype(x.dtype)
    return jnp.stack([a, b], axis=-1).reshape(*a.shape[:-1], x.shape[-1]).astype(x.dtype)


def _of_both(x: jax.Array, layout: str) -> jax.Array:
    """A number for each pair [..., H/2] as one for each of its two [..., H]."""
    return jnp.concatenate([x, x], axis=-1) if layout == "half" else jnp.repeat(x, 2, axis=-1)


def _others(x: jax.Array, layout: str) -> jax.Array:
    """Of each pair (a, b), (−b, a), float32. By a product with a matrix of 0 and ±1, which is exact: to take pairs apart would
    leave half of a TPU's lanes empty, and have it lay out every head anew."""
    width = x.shape[-1]
    pairs = np.arange(width).reshape(2, -1).T if layout == "half" else np.arange(width).reshape(-1, 2)
    swap = np.zeros((width, width), np.float32)
    swap[pairs[:, 1], pairs[:, 0]], swap[pairs[:, 0], pairs[:, 1]] = -1, 1
    # All three bfloat16 parts of a float32 have to come through; a bfloat16 is one.
    precision = None if x.dtype == jnp.bfloat16 else "highest"
    return jnp.matmul(x, jnp.asarray(swap, x.dtype), precision=precision, preferred_element_type=jnp.float32)


def frequencies(cfg: ModelConfig, width: int, length: jax.Array | None = None) -> jax.Array:
    """Rotary frequencies [width/2] (dynamic: [..., width/2]), float32, scaled as ``cfg.rope_scaling`` says.

    length [...]: tokens in the sequence, by which kind "dynamic" goes.
    """
    exponent = np.arange(0, width, 2) / width
    plain = cfg.rope_theta**-exponent  # float64: known before anything is traced
    scaling = cfg.rope_scaling
    if scaling.kind == "none":
        return jnp.asarray(plain, jnp.float32)
    if scaling.kind == "dynamic":
        assert length is not None and scaling.original_length is not None
        longer = jnp.maximum(length, scaling.original_length).astype(jnp.float32) / scaling.original_length
        stretch = scaling.factor * longer - (scaling.factor - 1)
        theta = cfg.rope_theta * stretch[..., None] ** (width / (width - 2))
        return theta ** jnp.asarray(-exponent, jnp.float32)
    keep = np.zeros_like(plain)
    if scaling.kind == "llama3":
        keep = _llama3(plain, scaling)
    elif scaling.kind == "yarn":
        keep = _yarn(scaling, cfg.rope_theta, width)
    return jnp.asarray(keep * plain + (1 - keep) * plain / scaling.factor, jnp.float32)


def _llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Share of each frequency that is kept."""
    turns = scaling.original_length * plain / (2 * np.pi)
    return np.clip((turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency), 0, 1)


def _yarn(scaling: RopeScaling, theta: float, width: int) -> np.ndarray:
    """Share of each frequency that is kept (Peng et al. 2023, section 3.2, with pairs in place of wavelengths)."""

    def pair(turns):  # the pair, a fraction, that turns so often in the original length
        return width * np.log(scaling.original_length / (turns * 2 * np.pi)) / (2 * np.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if high == low else high
    return 1 - np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)


def to_halves(cfg: ModelConfig, params: dict) -> tuple[ModelConfig, dict]:
    """The same function with rope_layout="half": the rotated part of every query and key head is put in order, evens before
    odds, and with it biases and norms of the head's width; values and outputs stay."""
    if cfg.attention != "grouped":
        raise ValueError(f"to_halves knows the heads of attention='grouped', not of {cfg.attention!r}")
    width = cfg.rotary_dim
    order = np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2), np.arange(width, cfg.head_dim)])

    def reordered(path: tuple, leaf):
        names = [entry.key for entry in path]
        tensor = names[-2] if names[-2] in ("query_norm", "key_norm") else names[-1]
        moved = "attention" in names and tensor in ("query", "key", "query_bias", "key_bias", "query_norm", "key_norm")
        return jnp.asarray(leaf)[..., order] if moved else leaf

    return dataclasses.replace(cfg, rope_layout="half"), jax.tree_util.tree_map_with_path(reordered, params)


def attention_factor(cfg: ModelConfig) -> float:
    """What rotated queries and keys are multiplied by."""
    scaling = cfg.rope_scaling
    if scaling.kind != "yarn":
        return 1.0
    return 0.1 * math.log(max(scaling.factor, 1.0)) + 1.0 if scaling.attention_factor is None else scaling.attention_factor
