"""Our arrays out of a file's tensors: transposed, cast and put on their shards a block at a time, so that memory holds the
arrays and little else."""

import functools
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer.config import ModelConfig
from jaxformer.config.spec import Param
from jaxformer.hf import safetensors_files
from jaxformer.hf.layout import Source

Sources = Sequence[tuple[tuple[int, ...], Source]]
"""``(index into our tensor, source)``: the index is of the layer and the expert, where a file has a tensor for each."""
BLOCK = 4 << 20  # bytes that are transposed at a time: the CPU's caches hold them
AT_ONCE = 8  # blocks, after which the pages that were read of the file are released
ALIGNMENT = 64  # bytes; a host array that starts so becomes a CPU's array without being copied


class TensorReader:
    """Reads tensors with the threads of all cores; a context manager."""

    def __init__(self, tensors: safetensors_files.Tensors, cfg: ModelConfig):
        self._tensors, self._cfg = tensors, cfg
        self._pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._pool.shutdown()

    def array(self, sources: Sources, param: Param, sharding: NamedSharding | None = None) -> jax.Array:
        """``param``'s array, on its shards (the default device unless given)."""
        device = jax.devices()[0] if sharding is None else next(iter(sharding.device_set))
        if device.platform == "cpu" or not param.dims.startswith("L"):
            return self._read(sources, param, param.dims, sharding)
        return self.by_layer(sources, param, sharding)

    def by_layer(self, sources: Sources, param: Param, sharding: NamedSharding | None) -> jax.Array:
        """A stacked array of an accelerator, of which the host never has more than a layer."""
        out = jnp.zeros(param.shape(self._cfg), self._dtype(param), device=sharding)
        of_layer = None if sharding is None else NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
        for layer in range(len(out)):
            layer_sources = [(row[1:], source) for row, source in sources if row[0] == layer]
            out = _put(out, self._read(layer_sources, param, param.dims[1:], of_layer), layer)
        return out

    def _dtype(self, param: Param) -> jnp.dtype:
        return jnp.dtype(param.dtype or self._cfg.param_dtype)

    def _read(self, sources: Sources, param: Param, dims: str, sharding: NamedSharding | None) -> jax.Array:
        sizes = sizes_of(param, self._cfg)
        shape = tuple(sizes[letter] for letter in dims)
        lead = len(sources[0][0])  # leading axes along which each index has a source

        def fill(index: Any) -> np.ndarray:
            spans = [range(*at.indices(size)) for at, size in zip(index, shape, strict=True)]
            out = _aligned([len(span) for span in spans], self._dtype(param))
            for row, source in sources:
                if all(i in span for i, span in zip(row, spans[:lead], strict=True)):
                    target = out[tuple(span.index(i) for i, span in zip(row, spans[:lead], strict=True))]
                    self._copy(target, source, dims[lead:], sizes, index[lead:])
            return out

        if sharding is None:
            return jax.device_put(fill((slice(None),) * len(shape)))
        return jax.make_array_from_callback(shape, sharding, fill)

    def _copy(self, out: np.ndarray, source: Source, dims: str, sizes: dict[str, int], index: tuple[slice, ...]) -> None:
        stored = self._tensors.read(source.name)
        view = source.take(stored, dims, sizes)[index]
        todo = blocks(view)
        for start in range(0, len(todo), AT_ONCE):
            list(self._pool.map(functools.partial(_copy_block, out, view), todo[start : start + AT_ONCE]))
            safetensors_files.release(stored)


def sizes_of(param: Param, cfg: ModelConfig) -> dict[str, int]:
    """Sizes of all letters; those of the tensor itself go before the config's."""
    return cfg.sizes | dict(param.sizes)


def blocks(view: np.ndarray) -> list[tuple[slice, ...]]:
    """Indices that cut an array into blocks of about ``BLOCK`` bytes along the axis that is outermost in its file."""
    if not view.ndim or not view.size:
        return [()]
    axis = max(range(view.ndim), key=lambda a: abs(view.strides[a]) * (view.shape[a] > 1))
    rows = max(1, BLOCK * view.shape[axis] // view.nbytes)
    return [(slice(None),) * axis + (slice(start, start + rows),) for start in range(0, view.shape[axis], rows)]


def _copy_block(out: np.ndarray, view: np.ndarray, at: tuple[slice, ...]) -> None:
    """XLA transposes on the way to a device, and casts there, ten times faster than numpy copies a transposed array."""
    block, host = view[at], _host()
    if host is None or block.itemsize > 4 or not block.flags.aligned or (block.flags.c_contiguous and block.dtype == out.dtype):
        out[at] = block
        return
    array = jax.device_put(block, host)
    out[at] = np.asarray(array if block.dtype == out.dtype else _cast(array, out.dtype))


@functools.partial(jax.jit, static_argnums=1)
def _cast(block, dtype):
    return block.astype(dtype)


@functools.cache
def _host() -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # started with accelerators alone
        return None


def _aligned(shape: Sequence[int], dtype: Any) -> np.ndarray:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


@functools.partial(jax.jit, donate_argnums=0)
def _put(out, layer, number):
    return jax.lax.dynamic_update_index_in_dim(out, layer, number, 0)
