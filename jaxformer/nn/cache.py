"""The cache of what attention has read: preallocated, declared like parameters, written in place, never past its end."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.config import ModelConfig
from jaxformer.config import spec as specs
from jaxformer.config.components import resolve
from jaxformer.config.spec import Param, zeros
from jaxformer.config.strict import dtype_name
from jaxformer.nn import attention, inputs, position, rope
from jaxformer.nn.layer_cache import SOURCE, LayerCache
from jaxformer.nn.mask import TokenInfo
from jaxformer.parallel.sharding import constrain


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

    def advance(self, shape: tuple[int, int], cfg: ModelConfig, positions, valid) -> tuple[TokenInfo, "Cache"]:
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
        chunk = inputs.token_info("", shape, cfg, jnp.maximum(order, 0) if positions is None else positions)
        return TokenInfo(order, chunk.position, None, None if valid is None else fed), dataclasses.replace(
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

    def layer(self, index: int, layer: ModelConfig, info: TokenInfo) -> LayerCache:
        """That of layer ``index``, of config ``layer``, for the chunk that was counted last, whose tokens stand at ``info``."""
        dims = tuple((name, param.dims) for name, param in layer_spec(layer).items())
        return LayerCache(self.layers[index], self.used, info, layer, dims, self.length)

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


def can_decode(cfg: ModelConfig) -> bool:
    """Whether the attention of every layer says what it keeps of a sequence."""
    components = (resolve("attention", layer.attention, attention.CHOICES) for layer in cfg.layers)
    return cfg.causal and all(getattr(component, "cache", None) is not None for component in components)


def layer_spec(layer: ModelConfig) -> dict[str, Param]:
    """What one layer keeps: the entries that its attention component's ``cache(cfg)`` declares, and positions where the scores
    need those of the keys. Entries have a letter B, first, and those that grow with the sequence a letter S."""
    component = resolve("attention", layer.attention, attention.CHOICES)
    if getattr(component, "cache", None) is None:
        raise ValueError(f"attention={layer.attention!r} needs cache(cfg), what it keeps of a sequence, to decode with a cache")
    kept = specs.with_sizes(component.cache(layer), layer.component_sizes)
    for name, param in kept.items():
        if not param.dims.startswith("B"):
            raise ValueError(f"attention={layer.attention!r}: its cache entry {name!r} is {param.dims!r}; B must come first")
    grows = any("S" in param.dims for param in kept.values())
    if grows and position.site(layer) == "scores":
        kept["position"] = Param("BS", zeros, dtype="int32")
    return kept


def spec(cfg: ModelConfig, batch: int, max_len: int, dtype: Any = None, ahead: int = 0) -> Cache:
    """The cache as ``Param``s: shapes, dtypes and letters, no memory. Arguments as ``init_cache``'s."""
    if not cfg.causal:
        raise ValueError("a cache needs causal attention: without it, every token would have to be computed again")
    dtype = dtype_name("dtype of the cache", cfg.execution.dtype if dtype is None else dtype)
    if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
        raise ValueError(f"ahead={ahead!r} must be an integer of at least 0")

    def sized(param: Param, slots: int) -> Param:
        sizes = (*param.sizes, ("B", batch), ("S", slots))
        return dataclasses.replace(param, sizes=sizes, dtype=param.dtype or dtype, decay=False)

    kept = [layer_spec(layer) for layer in cfg.layers]
    recurrent = [
        layer for layer, entries in zip(cfg.layers, kept, strict=True) if any("S" not in p.dims for p in entries.values())
    ]
    if recurrent and ahead:
        raise ValueError(f"attention={recurrent[0].attention!r} keeps a state of a recurrence: its tokens cannot be taken back")
    windows = [layer.window if isinstance(layer.window, int) else max_len for layer in cfg.layers]
    slots = [min(max_len, window + ahead) for window in windows]
    layers = [{name: sized(p, number) for name, p in entries.items()} for entries, number in zip(kept, slots, strict=True)]
    count = sized(Param("B", zeros, dtype="int32"), max_len)
    return Cache(tuple(layers), count, count, max_len, ahead if recurrent or min(slots) < max_len else max_len)


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
