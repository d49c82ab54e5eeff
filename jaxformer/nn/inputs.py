"""What may enter a model: everything wrong is a ValueError at the edge, before any work.

Values can be checked only when they are concrete. Inside ``jit`` they are not, and what would have been refused makes NaN.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.nn.mask import TokenInfo


def tokens(name: str, ids, cfg: ModelConfig) -> jax.Array:
    """``ids`` as an int32 array [B, T] of ids inside the vocabulary."""
    ids = _integers(name, ids)
    if ids.ndim != 2:
        raise ValueError(f"{name} must have the shape [batch, length], not {ids.shape}")
    if not ids.size:
        raise ValueError(f"{name} is empty: its shape is {ids.shape}")
    return _within(name, ids, cfg.vocab_size, f"the vocabulary of {cfg.vocab_size}")


def source(ids, valid, rows: int, cfg: ModelConfig) -> tuple[jax.Array, TokenInfo]:
    """What an encoder reads for ``rows`` rows of its decoder, int32 [B, S], and where it stands."""
    if not cfg.encoder_layers:
        raise ValueError("source was given, but the model has no encoder (encoder_layers=0)")
    if ids is None:
        raise ValueError("an encoder–decoder needs source=, the ids that its encoder reads")
    ids = tokens("source", ids, cfg)
    if len(ids) != rows:
        raise ValueError(f"source has {len(ids)} rows, its decoder has {rows}")
    return ids, token_info("source_", ids.shape, cfg, valid=valid)


def token_types(types, shape: tuple[int, int], cfg: ModelConfig) -> jax.Array | None:
    """Kinds of the tokens of a [B, T] batch: 0 unless given; None for a model that does not tell them apart."""
    if not cfg.token_types:
        if types is not None:
            raise ValueError("token_types were given, but the model tells none apart (token_types=0)")
        return None
    if types is None:
        return jnp.zeros(shape, jnp.int32)
    types = _shaped("token_types", _integers("token_types", types), shape)
    return _within("token_types", types, cfg.token_types, f"the {cfg.token_types} kinds")


def token_info(name: str, shape: tuple[int, int], cfg: ModelConfig, positions=None, segments=None, valid=None) -> TokenInfo:
    """Where the tokens of a [B, T] batch stand. Positions that are not given count the valid tokens of each segment."""
    batch, length = shape
    if segments is not None and "rope" in cfg.positions and cfg.rope_scaling.kind == "dynamic":
        raise ValueError("segments cannot be combined with rope_scaling of kind 'dynamic', which goes by the length of a row")
    if segments is not None:
        segments = _shaped(f"{name}segments", _integers(f"{name}segments", segments), shape)
        segments = _within(f"{name}segments", segments, 2**31, "the range of 32 bits", low=-(2**31))
    valid = None if valid is None else validity(name, valid, shape)
    index = jnp.arange(length, dtype=jnp.int32)[None]
    # Padding takes no place in a window: order counts what is valid, with and without a cache.
    order = index if valid is None else jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
    if positions is None:
        positions = _count(index, segments, valid)
        table(name, length, cfg)
    else:
        positions = _shaped(f"{name}positions", _integers(f"{name}positions", positions), shape)
        learned = "learned" in cfg.positions
        limit = cfg.max_length if learned else 2**31
        what = f"the learned table of max_length={limit} rows" if learned else "the range of positions"
        positions = _within(f"{name}positions", positions, limit, what)
    return TokenInfo(order, positions, segments, valid, ordered=True)


def validity(name: str, valid, shape: tuple[int, int]) -> jax.Array:
    """``valid`` as a boolean array of ``shape`` [B, T], or of one row."""
    valid = jnp.asarray(valid)
    if valid.dtype != bool:
        raise ValueError(f"{name}valid must be boolean (True for a real token), not {valid.dtype}")
    return _shaped(f"{name}valid", valid, shape)


def table(name: str, length: int, cfg: ModelConfig) -> None:
    """Raises ValueError if ``length`` positions do not fit a learned table."""
    if "learned" in cfg.positions and length > cfg.max_length:
        raise ValueError(f"{name}length {length} goes past the learned table of max_length={cfg.max_length} positions")


def _count(order, segments, valid):
    """Index of each token among the valid ones of its segment, for segments that are runs of equal ids."""
    if segments is None and valid is None:
        return order
    counted = jnp.cumsum(jnp.ones_like(segments) if valid is None else valid, axis=1, dtype=jnp.int32)
    if segments is None:
        return jnp.maximum(counted - 1, 0)
    starts = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    before = counted - (1 if valid is None else valid.astype(jnp.int32))
    base = jax.lax.cummax(jnp.where(starts, before, -1), axis=1)
    return jnp.maximum(counted - base - 1, 0)


def _integers(name: str, values) -> jax.Array | np.ndarray:
    """An integer array; of what is no JAX array yet, in full width: a cast to 32 bits would bring wrong ids into range."""
    if not isinstance(values, jax.Array):
        try:
            values = np.asarray(values)
        except ValueError as error:
            raise ValueError(f"{name} must be an array: {error}") from error
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, not {values.dtype}")
    return values


def _shaped(name: str, values: Any, shape: tuple[int, int]) -> Any:
    if values.ndim != 2 or values.shape[1] != shape[1] or values.shape[0] not in (1, shape[0]):
        raise ValueError(f"{name} has shape {values.shape}, tokens have {shape}")
    return values


def _within(name: str, values: Any, limit: int, what: str, low: int = 0) -> jax.Array:
    """``values`` as int32; a concrete one outside [low, limit) raises."""
    if not isinstance(values, jax.core.Tracer) and values.size:
        known = np.asarray(values)
        outside = np.argwhere((known < low) | (known >= limit))
        if outside.size:
            where = tuple(int(i) for i in outside[0])
            raise ValueError(f"{name}[{', '.join(map(str, where))}] = {int(known[where])} is outside {what}")
    return jnp.asarray(values, jnp.int32)
