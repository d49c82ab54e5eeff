"""What a cache holds, declared like parameters by the attention component of each layer; and how one is made."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.config import spec as specs
from jaxformer.config.components import resolve
from jaxformer.config.spec import Param, zeros
from jaxformer.config.strict import dtype_name
from jaxformer.nn import attention, inputs, position, rope
from jaxformer.nn.cache import SOURCE, Cache
from jaxformer.nn.mistakes import answers_mistakes
from jaxformer.parallel.sharding import constrain


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
    declared = component.cache(layer)
    if not isinstance(declared, dict) or not all(isinstance(param, Param) for param in declared.values()):
        raise ValueError(
            f"attention={layer.attention!r}: its cache(cfg) must give a dict of jf.Param, such as "
            f'{{"key": jf.Param("BKSH", jf.spec.zeros)}}, not {declared!r}'
        )
    kept = specs.with_sizes(declared, layer.component_sizes)
    for name, param in kept.items():
        if not param.dims.startswith("B"):
            raise ValueError(f"attention={layer.attention!r}: its cache entry {name!r} is {param.dims!r}; B must come first")
    grows = any("S" in param.dims for param in kept.values())
    if grows and position.site(layer) == "scores":
        kept["position"] = Param("BS", zeros, dtype="int32")
    return kept


def is_recurrent(layer: ModelConfig) -> bool:
    """Whether a layer keeps a state, which its tokens have changed for good."""
    return any("S" not in param.dims for param in layer_spec(layer).values())


def spec(cfg: ModelConfig, batch: int, max_len: int, dtype: Any = None, ahead: int = 0) -> Cache:
    """The cache as ``Param``s: shapes, dtypes and letters, no memory. Arguments as ``init_cache``'s."""
    if not cfg.causal:
        raise ValueError("a cache needs causal attention (causal=True); without it, every new token changes all earlier ones")
    dtype = dtype_name("dtype of the cache", cfg.execution.dtype if dtype is None else dtype)
    if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
        raise ValueError(f"ahead={ahead!r} must be an integer of at least 0")

    def sized(param: Param, slots: int) -> Param:
        sizes = (*param.sizes, ("B", batch), ("S", slots))
        return dataclasses.replace(param, sizes=sizes, dtype=param.dtype or dtype, decay=False)

    kept = [layer_spec(layer) for layer in cfg.layers]
    recurrent = list(filter(is_recurrent, cfg.layers))
    if recurrent and ahead:
        raise ValueError(f"attention={recurrent[0].attention!r} keeps a recurrent state, from which tokens cannot be removed")
    windows = [layer.window if isinstance(layer.window, int) else max_len for layer in cfg.layers]
    slots = [min(max_len, window + ahead) for window in windows]
    layers = [{name: sized(p, number) for name, p in entries.items()} for entries, number in zip(kept, slots, strict=True)]
    count = sized(Param("B", zeros, dtype="int32"), max_len)
    dims = tuple(tuple((name, p.dims) for name, p in entries.items()) for entries in kept)
    return Cache(tuple(layers), count, count, max_len, ahead if recurrent or min(slots) < max_len else max_len, dims)


def check(cache: Cache, cfg: ModelConfig) -> None:
    """Raises ValueError for a cache that was made for another config."""
    ahead = 0 if any(map(is_recurrent, cfg.layers)) else cache.ahead
    made = specs.abstract(spec(cfg, len(cache.used), cache.length, ahead=ahead), cfg)
    ours, theirs = ([{n: e.shape for n, e in layer.items() if n not in SOURCE} for layer in c.layers] for c in (cache, made))
    if ours != theirs:
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
        shapes = [layers[at] if at < len(layers) else "nothing" for layers in (ours, theirs)]
        raise ValueError(f"the cache was made for a different config: layer {at} has {shapes[0]}, not {shapes[1]}")


@answers_mistakes
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

    def empty_entry(param: Param, x: jax.ShapeDtypeStruct) -> jax.Array:
        return constrain(jnp.zeros(x.shape, x.dtype), param.dims)

    return jax.tree.map(empty_entry, spec, specs.abstract(spec, cfg), is_leaf=lambda leaf: isinstance(leaf, Param))


def size(cache: Cache) -> int:
    """Bytes of a cache, or of what its abstract form would take."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))
