"""The key/value cache: preallocated, written in place, never past its end."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.config import ModelConfig
from jaxformer.nn import inputs
from jaxformer.nn.attention import KeyValue
from jaxformer.nn.mask import Places


@struct.dataclass
class Cache:
    """Keys and values [B, K, S, H] of every layer, and what stands in each of the S slots.

    The first chunk of an encoder–decoder adds those of the source to each layer, for cross-attention.

    Slots are filled in order, by all rows together; a row's padding takes a slot that stays invisible.
    """

    layers: tuple[dict[str, Any], ...]
    used: Any
    """int32 []: slots filled."""
    position: Any
    """int32 [B, S]"""
    valid: Any
    """bool [B, S]"""

    @property
    def length(self) -> int:
        return self.valid.shape[1]

    def advance(self, shape: tuple[int, int], cfg: ModelConfig, positions, valid) -> tuple[Places, "Cache"]:
        """Places of a chunk [B, T] that goes into the next T slots, and the cache that has those slots marked.

        Raises ValueError if the chunk does not fit, where that is known; ``guard`` sees to the rest.
        """
        batch, length = shape
        if batch != self.valid.shape[0]:
            raise ValueError(f"tokens have {batch} rows, the cache has {self.valid.shape[0]}")
        if length > self.length or (not isinstance(self.used, jax.core.Tracer) and int(self.used) + length > self.length):
            raise ValueError(f"{length} tokens do not fit: {self.used} of the cache's {self.length} slots are used")
        valid = jnp.ones(shape, bool) if valid is None else jnp.broadcast_to(valid, shape)
        before = self.valid.sum(1, keepdims=True)
        order = before + jnp.cumsum(valid, axis=1) - 1
        chunk = inputs.places("", shape, cfg, jnp.maximum(order, before) if positions is None else positions, valid=valid)
        at = (0, self.used)
        return Places(order, chunk.position, None, chunk.valid), dataclasses.replace(
            self,
            used=self.used + length,
            position=jax.lax.dynamic_update_slice(self.position, chunk.position.astype(jnp.int32), at),
            valid=jax.lax.dynamic_update_slice(self.valid, valid, at),
        )

    def writer(self, index: int, start: jax.Array) -> "Writer":
        """For layer ``index`` and a chunk whose first slot is ``start``; ``self`` has the chunk's slots marked."""
        return Writer(self, index, start)

    def guard(self, x_BTD: jax.Array) -> jax.Array:
        """``x_BTD``, or NaN if the chunk went past the end (the write itself was shifted back, silently)."""
        return jnp.where(self.used <= self.length, x_BTD, jnp.nan)


class Writer:
    """One layer's entry while a chunk passes through the layer; ``entry`` is then the new one."""

    def __init__(self, cache: Cache, index: int, start: jax.Array):
        self.entry = cache.layers[index]
        self._start = start
        # The order of a slot counts the row's valid tokens up to it, so that padding takes nothing from a window.
        self._places = Places(jnp.cumsum(cache.valid, axis=1) - 1, cache.position, None, cache.valid)

    def extend(self, new: KeyValue) -> KeyValue:
        """Writes the chunk's keys and values into their slots; gives the whole cache to read."""
        at = (0, 0, self._start, 0)
        for name, value in zip(("key", "value"), new[:2], strict=True):
            old = self.entry[name]
            self.entry = self.entry | {name: jax.lax.dynamic_update_slice(old, value.astype(old.dtype), at)}
        k_BKSH, v_BKSH = (self.entry[name].astype(new[0].dtype) for name in ("key", "value"))
        return k_BKSH, v_BKSH, self._places

    def remember(self, source: KeyValue | None) -> KeyValue:
        """Keeps the keys and values of the encoder's output; without them (None) gives those kept."""
        if source is not None:
            self.entry = self.entry | dict(zip(SOURCE, source, strict=True))
        elif SOURCE[0] not in self.entry:
            raise ValueError("the first chunk of an encoder–decoder needs source=; later ones read it from the cache")
        k_BKSH, v_BKSH, places = (self.entry[name] for name in SOURCE)
        return k_BKSH, v_BKSH, places


SOURCE = ("source_key", "source_value", "source_places")


def init_cache(cfg: ModelConfig, batch: int, max_len: int, dtype=None) -> Cache:
    """An empty cache for ``batch`` rows of at most ``max_len`` tokens, padding included.

    dtype: of the kept keys and values; the compute dtype unless given. Raises ValueError past a learned position table.
    """
    inputs.table("cache ", max_len, cfg)
    shape = (batch, cfg.n_kv_heads, max_len, cfg.head_dim)
    dtype = jnp.dtype(dtype or cfg.dtype)
    return Cache(
        layers=tuple({"key": jnp.zeros(shape, dtype), "value": jnp.zeros(shape, dtype)} for _ in range(cfg.n_layers)),
        used=jnp.zeros((), jnp.int32),
        position=jnp.zeros((batch, max_len), jnp.int32),
        valid=jnp.zeros((batch, max_len), bool),
    )
