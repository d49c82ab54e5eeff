"""The cache of what attention has read: preallocated, written in place, never past its end. (``cache_spec`` makes one.)

Methods change nothing: each gives a new record.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.config import ModelConfig
from jaxformer.config.components import BUILT_IN
from jaxformer.nn import inputs
from jaxformer.nn.mask import TokenInfo, visible
from jaxformer.parallel.sharding import constrain

Entries = dict[str, jax.Array]
"""Tensors by name, as the attention component's ``cache(cfg)`` declares them."""
KeyValue = tuple[jax.Array, jax.Array, TokenInfo]
"""Keys and values [B, K, S, H] of a sequence, and where its tokens stand."""
SOURCE = ("source_key", "source_value", "source_info")
"""Entries of cross-attention: what it reads of the encoder's output."""


@struct.dataclass
class LayerCache:
    """One layer's cache while a chunk of tokens passes through the layer. Its methods give a new one.

    Rows fill their slots independently of each other: token n of a row stands in slot n, and padding takes none. With a
    window, a layer has only as many slots as that needs, a ring: token n stands in slot n mod S.
    """

    entries: dict[str, Any]
    used: Any
    """int32 [B]: tokens of each row so far, this chunk's included."""
    info: TokenInfo
    """Where the chunk's tokens stand."""
    cfg: ModelConfig = struct.field(pytree_node=False)
    """The layer's config."""
    dims: tuple[tuple[str, str], ...] = struct.field(pytree_node=False)
    """Names of the attention's entries, and their letters."""
    length: int = struct.field(pytree_node=False)
    """Tokens that a row may have."""

    def extend(self, new: Entries) -> tuple[Entries, TokenInfo, "LayerCache"]:
        """Writes the chunk's entries into their slots. Gives all that the chunk's queries may have to read, where the tokens
        of those stand, and the cache that holds them.

        Slots that hold no token, or one that was taken back, may hold anything, NaN too, and a weight of 0 would not hide that:
        a component that is not the library's own gets zeros in the place of what none of the queries sees."""
        new = new | ({"position": self.info.position} if "position" in self._axes else {})
        if new.keys() != self._axes.keys():
            raise ValueError(f"attention={self.cfg.attention!r} keeps {sorted(new)}; its cache has {sorted(self._axes)}")
        slot, letters = self._slot(), dict(self.dims)
        written = {name: _write(self.entries[name], new[name], slot, axis) for name, axis in self._axes.items()}
        written = {name: constrain(x, letters[name]) for name, x in written.items()}
        kept, order, valid = self._readable(written, new)
        info = TokenInfo(order, kept.get("position", order), None, valid)
        if self.cfg.attention not in BUILT_IN["attention"]:  # those select themselves, at less cost
            kept = self._seen(kept, info)
        readable = {name: kept[name].astype(x.dtype) for name, x in new.items() if name != "position"}
        return readable, info, dataclasses.replace(self, entries=self.entries | written)

    def put(self, new: Entries) -> "LayerCache":
        """Replaces entries that have no axis of positions: the state of a recurrence, after the chunk. Padding must have left
        it as it was (``info.valid``), whatever it is: by ``jnp.where``, not by a product with 0."""
        for name, x in new.items():
            before = self.entries.get(name)
            if before is None or name in self._axes or x.shape != before.shape:
                declared = {name: self.entries[name].shape for name, letters in self.dims if "S" not in letters}
                raise ValueError(f"{name!r} of shape {x.shape} does not belong to this layer's cache, which has {declared}")
        stored = {name: x.astype(self.entries[name].dtype) for name, x in new.items()}
        return dataclasses.replace(self, entries=self.entries | stored)

    def with_source(self, source: KeyValue | None) -> tuple[KeyValue, "LayerCache"]:
        """Keeps the keys and values of the encoder's output; without them (None) gives those kept."""
        cache = self
        if source is not None:
            k_BKSH, v_BKSH, info = source
            info = jax.tree.map(lambda x: _rows(x, k_BKSH), info)  # a row each, so that rows can be taken
            kept = dict(zip(SOURCE, (k_BKSH, v_BKSH, info), strict=True))
            cache = dataclasses.replace(self, entries=self.entries | kept)
        elif SOURCE[0] not in self.entries:
            raise ValueError("the first chunk of an encoder–decoder needs source=; later ones read it from the cache")
        k_BKSH, v_BKSH, info = (cache.entries[name] for name in SOURCE)
        return (k_BKSH, v_BKSH, info), cache

    def _seen(self, kept: Entries, info: TokenInfo) -> Entries:
        mask_BTS = visible(self.info, info, causal=True, window=self.cfg.window)
        assert mask_BTS is not None
        seen_BS = mask_BTS.any(1)

        def selected(x, axis):
            return jnp.where(jnp.expand_dims(seen_BS, [*range(1, axis), *range(axis + 1, x.ndim)]), x, 0)

        return {name: selected(x, self._axes[name]) for name, x in kept.items()}

    @property
    def _axes(self) -> dict[str, int]:
        """The axis of positions of every entry that has one."""
        return {name: letters.index("S") for name, letters in self.dims if "S" in letters}

    @property
    def _slots(self) -> int:
        return next(self.entries[name].shape[axis] for name, axis in self._axes.items())

    @property
    def _is_ring(self) -> bool:
        return self._slots < self.length

    def _slot(self) -> jax.Array:
        """Slot [B, T] of every token of the chunk; past the end, and all different, for those that are not kept."""
        order = self.info.order
        keep = jnp.ones(order.shape, bool) if self.info.valid is None else self.info.valid
        if self._is_ring:
            keep = keep & (order >= self.used[:, None] - self._slots) & (order < self.length)
        nowhere = self._slots + jnp.arange(order.shape[1])
        return jnp.where(keep, order % self._slots if self._is_ring else order, nowhere)

    def _readable(self, written: Entries, new: Entries) -> tuple[Entries, jax.Array, jax.Array | None]:
        """The entries that the chunk's queries read, their order, and which of them are there."""
        if not self._is_ring:  # slot n holds token n, and causality hides those that hold none yet
            return written, jnp.arange(self._slots, dtype=jnp.int32)[None], None
        chunk, window = self.info, self.cfg.window
        assert isinstance(window, int)
        if chunk.order.shape[1] + window - 1 <= self._slots:
            order = _ring_order(self.used, self._slots)
            return written, order, order >= 0
        # The chunk's first queries need what its last tokens have overwritten.
        fed = jnp.ones(chunk.order.shape, bool) if chunk.valid is None else jnp.broadcast_to(chunk.valid, chunk.order.shape)
        old = _ring_order(self.used - fed.sum(1, dtype=jnp.int32), self._slots)
        order = jnp.concatenate([old, chunk.order], axis=1)
        kept = {}
        for name, axis in self._axes.items():
            before = self.entries[name]
            kept[name] = jnp.concatenate([before, _rows(new[name], old).astype(before.dtype)], axis)
        return kept, order, jnp.concatenate([old >= 0, fed], axis=1)


@struct.dataclass
class Cache:
    """What every layer's attention keeps of each row's tokens (``Component.cache``: keys and values [B, K, S, H], say).

    Rows fill their slots independently of each other, token n of a row in slot n; padding takes none. A layer with a window
    keeps only as many slots as that needs, as a ring: token n stands in slot n mod S. The first chunk of an encoder–decoder
    adds the keys and values of the source to each layer, for cross-attention.
    """

    layers: tuple[dict[str, Any], ...]
    used: Any
    """int32 [B]: tokens of each row so far."""
    reach: Any
    """int32 [B]: the most that ``used`` has been: slots of a ring may hold tokens up to there."""
    length: int = struct.field(pytree_node=False)
    """Tokens that a row may have."""
    ahead: int = struct.field(pytree_node=False)
    """Tokens that ``rewind`` may take back; all, without rings."""
    dims: tuple[tuple[tuple[str, str], ...], ...] = struct.field(pytree_node=False)
    """Of each layer, names and letters of its entries."""

    def advance(self, shape: tuple[int, int], cfg: ModelConfig, positions, valid) -> tuple[TokenInfo, "Cache"]:
        """Where the tokens of the next chunk [B, T] stand, and the cache that counts it (its layers are still to be written).

        Raises ValueError if the chunk does not fit, where that is known; ``guard`` sees to the rest.
        """
        batch, length = shape
        if batch != len(self.used):
            raise ValueError(f"the tokens have {batch} rows, but the cache has {len(self.used)}")
        if positions is not None and cfg.rope_scaling.kind == "dynamic":
            raise ValueError(
                "positions cannot be given with a cache and rope_scaling of kind 'dynamic', which depends on the length"
            )
        fed = jnp.ones(shape, bool) if valid is None else jnp.broadcast_to(inputs.validity("", valid, shape), shape)
        used = self.used + fed.sum(1, dtype=jnp.int32)
        if isinstance(used, jax.core.Tracer):
            if valid is None and length > self.length:
                raise ValueError(f"{length} tokens do not fit: the cache has {self.length} slots")
        elif int(used.max()) > self.length:
            row = int(used.argmax())
            left = f"{int(self.used[row])} of the cache's {self.length} slots are used"
            raise ValueError(f"{int(fed[row].sum())} tokens do not fit: {left} (row {row})")
        order = self.used[:, None] + jnp.cumsum(fed, axis=1, dtype=jnp.int32) - 1
        chunk = inputs.token_info("", shape, cfg, jnp.maximum(order, 0) if positions is None else positions)
        return TokenInfo(order, chunk.position, None, None if valid is None else fed), dataclasses.replace(
            self, used=used, reach=jnp.maximum(self.reach, used)
        )

    def layer(self, index: int, cfg: ModelConfig, info: TokenInfo) -> LayerCache:
        """The cache of layer ``index``, of config ``cfg``, for the chunk that was counted last, at ``info``."""
        return LayerCache(self.layers[index], self.used, info, cfg, self.dims[index], self.length)

    def guard(self, x_BTD: jax.Array) -> jax.Array:
        """``x_BTD``, with NaN in the rows that have gone past the end (what did not fit was not written)."""
        return jnp.where((self.used <= self.length)[:, None, None], x_BTD, jnp.nan)

    def rewind(self, used: jax.Array) -> "Cache":
        """Forgets all but each row's first ``used`` [B] tokens; with windows, no more than the ``ahead`` of ``init_cache``.

        A row that would gain tokens, or lose more than it may, is a ValueError where the numbers are known; else all that it
        gives from then on is NaN.
        """
        used = jnp.broadcast_to(jnp.asarray(used, jnp.int32), self.used.shape)
        least = jnp.maximum(self.reach - self.ahead, 0)
        wrong = (used < least) | (used > self.used)
        if not isinstance(wrong, jax.core.Tracer) and bool(wrong.any()):
            raise ValueError(f"cannot rewind to {used} tokens: the rows have {self.used} and must keep at least {least}")
        return dataclasses.replace(self, used=jnp.where(wrong, self.length + 1, used))

    def take(self, rows: jax.Array, source: bool = True) -> "Cache":
        """The cache of ``rows`` [any number], each a row of this one. source=False leaves the source's entries as they are,
        for rows that change places only with rows of the same source."""
        layers = tuple(
            {name: jax.tree.map(lambda x: x[rows], e) if source or name not in SOURCE else e for name, e in layer.items()}
            for layer in self.layers
        )
        return dataclasses.replace(self, layers=layers, used=self.used[rows], reach=self.reach[rows])


def _rows(x: jax.Array, like: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x, (like.shape[0], *x.shape[1:]))


def _ring_order(used: jax.Array, slots: int) -> jax.Array:
    """[B, S]: which token stands in each slot of a ring after ``used`` [B] tokens; negative where none does."""
    last = used[:, None] - 1
    return last - (last - jnp.arange(slots, dtype=jnp.int32)) % slots


def _write(old: jax.Array, new: jax.Array, slot: jax.Array, axis: int) -> jax.Array:
    """``old`` with ``new`` in the slots [B, T] of its axis S; slots past the end are not written."""
    new = _rows(new, old).astype(old.dtype)
    if slot.size == 1:
        # XLA makes a plain update of a scatter to one slot, and fuses that into each of its readers, with a copy of the whole
        # cache for each. To two slots, one of them nowhere, it stays what it is: done once, in place.
        slot = jnp.concatenate([slot, slot + old.shape[axis]], axis=1)
        new = jnp.concatenate([new, new], axis=axis)

    def row(old, new, slot):
        at = (*[slice(None)] * (axis - 1), slot)
        return old.at[at].set(new, mode="drop", unique_indices=True)

    return jax.vmap(row)(old, new, slot)
