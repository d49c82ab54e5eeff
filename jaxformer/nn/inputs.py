"""Checks of a model's inputs: everything wrong is a ValueError, before any work.

Values can be checked only where they are concrete. Inside ``jit`` they are not, and a value that would be refused gives NaN.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.nn.mask import TokenInfo


def tokens(name: str, ids, cfg: ModelConfig) -> jax.Array:
    """``ids`` as an int32 array [B, T]. Raises ValueError for ids outside the vocabulary."""
    ids = _integers(name, ids)
    if ids.ndim != 2:
        raise ValueError(f"{name} must have the shape [batch, length], not {ids.shape}")
    if not ids.size:
        raise ValueError(f"{name} is empty: its shape is {ids.shape}")
    return _within(name, ids, cfg.vocab_size, f"the vocabulary of {cfg.vocab_size}")


class Embeddings(NamedTuple):
    """What stands in place of rows of the embedding table."""

    values: jax.Array
    """[B or 1, T, D], of a floating dtype."""
    mask: jax.Array | None
    """bool [B or 1, T]: True for an embedding, False for a token; None: all are embeddings."""


def tokens_or_embeddings(
    ids, embeddings, mask, cfg: ModelConfig
) -> tuple[jax.Array | None, Embeddings | None, tuple[int, int]]:
    """Tokens [B, T] and embeddings of one batch, checked, and its shape (B, T). Without embeddings there are tokens everywhere,
    without tokens embeddings; with both, ``mask`` says where the embeddings are."""
    if embeddings is None:
        if mask is not None:
            raise ValueError("embeddings_mask has no effect without embeddings; give both")
        if ids is None:
            raise ValueError("there are no tokens; give tokens [B, T], or embeddings= [B, T, D] in their place")
        ids = tokens("tokens", ids, cfg)
        return ids, None, ids.shape
    values = jnp.asarray(embeddings)
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise ValueError(f"embeddings must be of a floating dtype, not {values.dtype}")
    if values.ndim != 3 or values.shape[2] != cfg.d_model or not values.size:
        raise ValueError(f"embeddings have shape {values.shape}; they must have [batch, length, d_model={cfg.d_model}]")
    if ids is None:
        if mask is not None:
            raise ValueError("embeddings_mask chooses between tokens and embeddings, but tokens is None; leave it out")
        return None, Embeddings(values, None), (values.shape[0], values.shape[1])
    ids = tokens("tokens", ids, cfg)
    if mask is None:
        raise ValueError(
            "there are tokens and embeddings: give embeddings_mask= [B, T], True where the embedding counts, or tokens=None"
        )
    mask = jnp.asarray(mask)
    if mask.dtype != bool:
        raise ValueError(f"embeddings_mask must be boolean (True for an embedding), not {mask.dtype}")
    values = _shaped("embeddings", values, ids.shape, width=(cfg.d_model,))
    return ids, Embeddings(values, _shaped("embeddings_mask", mask, ids.shape)), ids.shape


def without_padding(embeddings: Embeddings | None, info: TokenInfo) -> Embeddings | None:
    """Zeros in the place of embeddings of padding: nobody sees it, but 0 · NaN is NaN."""
    if embeddings is None or info.valid is None:
        return embeddings
    return embeddings._replace(values=jnp.where(info.valid[..., None], embeddings.values, 0))


def source(ids, valid, rows: int, cfg: ModelConfig) -> tuple[jax.Array, TokenInfo]:
    """The tokens that an encoder reads for a decoder of ``rows`` rows, int32 [B, S], and their ``TokenInfo``."""
    if not cfg.encoder_layers:
        raise ValueError("source was given, but the model has no encoder (encoder_layers=0)")
    if ids is None:
        raise ValueError("an encoder–decoder needs source=, the ids that its encoder reads")
    ids = tokens("source", ids, cfg)
    if len(ids) != rows:
        raise ValueError(f"source has {len(ids)} rows, but the decoder's tokens have {rows}")
    return ids, token_info("source_", ids.shape, cfg, valid=valid)


def token_types(types, shape: tuple[int, int], cfg: ModelConfig) -> jax.Array | None:
    """Types of the tokens of a [B, T] batch, 0 unless given; None for a model without token types."""
    if not cfg.token_types:
        if types is not None:
            raise ValueError("token_types were given, but the model has none (token_types=0)")
        return None
    if types is None:
        return jnp.zeros(shape, jnp.int32)
    types = _shaped("token_types", _integers("token_types", types), shape)
    return _within("token_types", types, cfg.token_types, f"the {cfg.token_types} token types")


def token_info(name: str, shape: tuple[int, int], cfg: ModelConfig, positions=None, segments=None, valid=None) -> TokenInfo:
    """The ``TokenInfo`` of a [B, T] batch. Positions that are not given count the valid tokens of each segment."""
    batch, length = shape
    if segments is not None and "rope" in cfg.positions and cfg.rope_scaling.kind == "dynamic":
        raise ValueError(
            "segments cannot be combined with rope_scaling of kind 'dynamic', which depends on the length of a row"
        )
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
    """Index of each token among the valid tokens of its segment, for segments that are runs of equal ids."""
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
    """An integer array. What is not a JAX array keeps its width: a cast to 32 bits would bring wrong ids into range."""
    if not isinstance(values, jax.Array):
        try:
            values = np.asarray(values)
        except jax.errors.TracerArrayConversionError:  # a list that was an argument of a jitted function
            values = jnp.asarray(values)
        except ValueError as error:
            raise ValueError(f"{name} must be an array: {error}") from error
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, not {values.dtype}")
    return values


def int32(values: Any) -> jax.Array:
    """Integers as int32. What 32 bits do not hold becomes the nearest that they do, never an id by wrapping around."""
    values = values if isinstance(values, jax.Array) else np.asarray(values)
    if values.dtype.itemsize >= 4 and values.dtype != np.int32:
        limits = jnp.iinfo(values.dtype)
        values = values.clip(max(limits.min, -(2**31)), min(limits.max, 2**31 - 1))
    return jnp.asarray(values, jnp.int32)


def _shaped(name: str, values: Any, shape: tuple[int, int], width: tuple[int, ...] = ()) -> Any:
    """``values``, whose shape must be ``shape`` [B, T], or one row of it, followed by ``width``."""
    if values.shape not in ((*shape, *width), (1, shape[1], *width)):
        raise ValueError(f"{name} has shape {values.shape}, but tokens have {shape}")
    return values


def _within(name: str, values: Any, limit: int, what: str, low: int = 0) -> jax.Array:
    """``values`` as int32; a concrete one outside [low, limit) raises."""
    if not isinstance(values, jax.core.Tracer) and values.size:
        concrete = np.asarray(values)
        outside = np.argwhere((concrete < low) | (concrete >= limit))
        if outside.size:
            where = tuple(int(i) for i in outside[0])
            raise ValueError(f"{name}[{', '.join(map(str, where))}] = {int(concrete[where])} is outside {what}")
    return int32(values)
