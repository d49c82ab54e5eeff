"""The cache of what attention has read: preallocated, declared like parameters, written in place, never past its end."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer import spec as specs
from jaxformer.config import ModelConfig
from jaxformer.nn import attention, inputs, position, rope
from jaxformer.nn.attend import Entries
from jaxformer.nn.attention import KeyValue
from jaxformer.nn.mask import Places
from jaxformer.record import dtype_name
from jaxformer.sharding import constrain
from jaxformer.spec import Param, zeros


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

    def advance(self, shape: tuple[int, int], cfg: ModelConfig, positions, valid) -> tuple[Places, "Cache"]:
        """Places of a chunk [B, T] that comes next, and the cache that counts it (its layers are still to be written).

        Raises ValueError if the chunk does not fit, where that is known; ``guard`` sees to the rest.
        """
        batch, length = shape
        if batch != len(self.used):
            raise ValueError(f"tokens have {batch} rows, the cache has {len(self.used)}")
        self._check(cfg)
        if positions is not None and cfg.rope_scaling.kind == "dynamic":
            raise ValueError(
                "positions cannot be given with a cache and rope_scaling of kind 'dynamic', which goes by the length"
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
        chunk = inputs.places("", shape, cfg, jnp.maximum(order, 0) if positions is None else positions)
        return Places(order, chunk.position, None, None if valid is None else fed), dataclasses.replace(
            self, used=used, reach=jnp.maximum(self.reach, used)
        )

    def _check(self, cfg: ModelConfig) -> None:
        """Raises ValueError for a cache that was made for another config."""
        made = specs.abstract(spec(cfg, len(self.used), self.length, ahead=self.ahead), cfg)
        ours, theirs = ([{n: e.shape for n, e in layer.items() if n not in SOURCE} for layer in c.layers] for c in (self, made))
        if ours != theirs:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
            shapes = [layers[at] if at < len(layers) else "nothing" for layers in (ours, theirs)]
            raise ValueError(f"the cache was made for another config: in layer {at} it has {shapes[0]}, not {shapes[1]}")

    def writer(self, index: int, layer: ModelConfig, places: Places) -> "Writer":
        """For layer ``index``, of config ``layer``, and the chunk that was counted last, at ``places``."""
        return Writer(self, index, layer, places)

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
            raise ValueError(f"rewind to {used} tokens: the rows have {self.used}, and must keep {least}")
        return dataclasses.replace(self, used=jnp.where(wrong, self.length + 1, used))

    def take(self, rows: jax.Array, source: bool = True) -> "Cache":
        """The cache of ``rows`` [any number], each a row of this one. source=False leaves the source's entries as they are,
        for rows that change places only with rows of the same source."""
        layers = tuple(
            {name: jax.tree.map(lambda x: x[rows], e) if source or name not in SOURCE else e for name, e in layer.items()}
            for layer in self.layers
        )
        return dataclasses.replace(self, layers=layers, used=self.used[rows], reach=self.reach[rows])


class Writer:
    """One layer's entry while a chunk passes through the layer; ``entry`` is then the new one."""

    def __init__(self, cache: Cache, index: int, layer: ModelConfig, places: Places):
        self.entry = cache.layers[index]
        self._used, self._layer, self._chunk = cache.used, layer, places
        self._dims = {name: param.dims for name, param in layer_spec(layer).items()}
        self._axes = {name: dims.index("S") for name, dims in self._dims.items()}
        self._slots = next(self.entry[name].shape[axis] for name, axis in self._axes.items())
        self._length, self._ring = cache.length, self._slots < cache.length

    def extend(self, new: Entries) -> tuple[Entries, Places]:
        """Writes the chunk's entries into their slots; gives all that the chunk's queries may have to read."""
        stored = new | ({"position": self._chunk.position} if "position" in self._axes else {})
        if stored.keys() != self._axes.keys():
            raise ValueError(f"attention={self._layer.attention!r} keeps {sorted(stored)}; its cache has {sorted(self._axes)}")
        before, slot = self.entry, self._slot()
        written = {name: _write(before[name], stored[name], slot, axis) for name, axis in self._axes.items()}
        written = {name: constrain(x, self._dims[name]) for name, x in written.items()}
        self.entry = before | written
        kept, order, valid = self._readable(before, written, stored)
        places = Places(order, kept.get("position", order), None, valid)
        return {name: kept[name].astype(x.dtype) for name, x in new.items()}, places

    def _slot(self) -> jax.Array:
        """Slot [B, T] of every token of the chunk; past the end, and all different, for those that are not kept."""
        order = self._chunk.order
        keep = jnp.ones(order.shape, bool) if self._chunk.valid is None else self._chunk.valid
        if self._ring:
            keep = keep & (order >= self._used[:, None] - self._slots) & (order < self._length)
        nowhere = self._slots + jnp.arange(order.shape[1])
        return jnp.where(keep, order % self._slots if self._ring else order, nowhere)

    def _readable(self, before: Entries, written: Entries, stored: Entries) -> tuple[Entries, jax.Array, jax.Array | None]:
        """The entries that the chunk's queries read, their order, and which of them are there."""
        if not self._ring:  # slot n holds token n, and causality hides those that hold none yet
            return written, jnp.arange(self._slots, dtype=jnp.int32)[None], None
        chunk, window = self._chunk, self._layer.window
        assert isinstance(window, int)
        if chunk.order.shape[1] + window - 1 <= self._slots:
            order = _ring_order(self._used, self._slots)
            return written, order, order >= 0
        # The chunk's first queries need what its last tokens have overwritten.
        fed = jnp.ones(chunk.order.shape, bool) if chunk.valid is None else jnp.broadcast_to(chunk.valid, chunk.order.shape)
        old = _ring_order(self._used - fed.sum(1, dtype=jnp.int32), self._slots)
        order = jnp.concatenate([old, chunk.order], axis=1)
        kept = {
            name: jnp.concatenate([before[name], _rows(stored[name], old).astype(before[name].dtype)], axis)
            for name, axis in self._axes.items()
        }
        return kept, order, jnp.concatenate([old >= 0, fed], axis=1)

    def remember(self, source: KeyValue | None) -> KeyValue:
        """Keeps the keys and values of the encoder's output; without them (None) gives those kept."""
        if source is not None:
            k_BKSH, v_BKSH, places = source
            places = jax.tree.map(lambda x: _rows(x, k_BKSH), places)  # a row each, so that rows can be taken
            self.entry = self.entry | dict(zip(SOURCE, (k_BKSH, v_BKSH, places), strict=True))
        elif SOURCE[0] not in self.entry:
            raise ValueError("the first chunk of an encoder–decoder needs source=; later ones read it from the cache")
        k_BKSH, v_BKSH, places = (self.entry[name] for name in SOURCE)
        return k_BKSH, v_BKSH, places


SOURCE = ("source_key", "source_value", "source_places")


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


def layer_spec(layer: ModelConfig) -> dict[str, Param]:
    """What one layer keeps: its attention's entries, and positions where the scores need those of the keys."""
    kept = attention.cache(layer)
    return kept | ({"position": Param("BS", zeros, dtype="int32")} if position.site(layer) == "scores" else {})


def spec(cfg: ModelConfig, batch: int, max_len: int, dtype: Any = None, ahead: int = 0) -> Cache:
    """The cache as ``Param``s: shapes, dtypes and letters, no memory. Arguments as ``init_cache``'s."""
    if not cfg.causal:
        raise ValueError("a cache needs causal attention: without it, every token would have to be computed again")
    dtype = dtype_name("dtype of the cache", cfg.dtype if dtype is None else dtype)
    if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
        raise ValueError(f"ahead={ahead!r} must be an integer of at least 0")

    def sized(param: Param, slots: int) -> Param:
        sizes = (*param.sizes, ("B", batch), ("S", slots))
        return dataclasses.replace(param, sizes=sizes, dtype=param.dtype or dtype, decay=False)

    windows = [layer.window if isinstance(layer.window, int) else max_len for layer in cfg.layers]
    slots = [min(max_len, window + ahead) for window in windows]
    layers = [
        {name: sized(param, number) for name, param in layer_spec(layer).items()}
        for layer, number in zip(cfg.layers, slots, strict=True)
    ]
    count = sized(Param("B", zeros, dtype="int32"), max_len)
    return Cache(tuple(layers), count, count, max_len, ahead if min(slots) < max_len else max_len)


def init_cache(cfg: ModelConfig, batch: int, max_len: int, dtype: Any = None, ahead: int = 0) -> Cache:
    """An empty cache for ``batch`` rows of at most ``max_len`` tokens each.

    dtype: of the kept keys and values; the compute dtype unless given. ahead: how many tokens ``rewind`` may take back from
    layers with a window. Raises ValueError past a learned position table.
    """
    for name, number in (("batch", batch), ("max_len", max_len)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name}={number!r} must be an integer of at least 1")
    inputs.table("cache ", max_len, cfg)
    rope.check_cache(cfg, max_len)
    return empty(spec(cfg, batch, max_len, dtype, ahead), cfg)


def empty(spec: Cache, cfg: ModelConfig) -> Cache:
    """The cache that ``spec`` declares, with nothing in it; on a mesh, each part is made where it belongs."""

    def one(param: Param, x: jax.ShapeDtypeStruct) -> jax.Array:
        return constrain(jnp.zeros(x.shape, x.dtype), param.dims)

    return jax.tree.map(one, spec, specs.abstract(spec, cfg), is_leaf=lambda leaf: isinstance(leaf, Param))


def size(cache: Cache) -> int:
    """Bytes of a cache, or of what its abstract form would take."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))
