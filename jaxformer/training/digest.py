"""What is known of every array of a state when it is saved, and is compared when it is read: a digest of its bits, and whether
its numbers are finite.

A digest is the sum mod 2^32 of one integer for each element, made of the element's bits and its index by a function that can be
inverted for every index. Integers add up to the same sum in any order, so it is the same on every mesh; a change of one element
always changes it, and any other change remains unnoticed with probability 2^-32.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.parallel import multihost

FINITE, INFINITE, NAN = "finite", "inf", "nan"


class Summary(NamedTuple):
    """What is known of an array."""

    digest: str
    """8 hexadecimal digits."""
    numbers: str
    """finite, inf, or nan."""


def summaries(tree: Any) -> dict[str, Summary]:
    """The summary of every array of ``tree``, by its path (``path_name``); the same in every process and on every mesh."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    computed = {path_name(path): _summary(_on_device(x)) for path, x in leaves}  # all are dispatched before one is waited for
    kinds = (FINITE, INFINITE, NAN)
    read = {name: [int(multihost.to_numpy(value)) for value in pair] for name, pair in computed.items()}
    return {name: Summary(f"{digest:08x}", kinds[kind]) for name, (digest, kind) in read.items()}


def path_name(path: Any) -> str:
    """A path of ``jax.tree_util`` as names with dots, for nodes of any type: decoder.layers.mlp.down."""
    return ".".join(str(next(getattr(entry, a) for a in ("key", "name", "idx") if hasattr(entry, a))) for entry in path)


def names(tree: Any) -> list[str]:
    """The path of every leaf, in the order of ``jax.tree.leaves``."""
    return [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


@jax.jit
def digest(x: jax.Array) -> jax.Array:
    """The digest of an array: uint32 []."""
    bits = _bits(x)
    index, stride = jnp.zeros(bits.shape, jnp.uint32), 1
    for axis in reversed(range(bits.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    return jnp.sum(_mixed(bits + index * jnp.uint32(0x9E3779B9)), dtype=jnp.uint32)


@jax.jit
def _summary(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    kind = jnp.zeros((), jnp.int32)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        # A scalar of an optimizer's state may be infinite, such as the best loss so far of one that adapts its rate.
        is_infinite = jnp.isinf(x).any() & (x.ndim > 0)
        kind = jnp.where(jnp.isnan(x).any(), 2, is_infinite.astype(jnp.int32))
    return digest(x), kind


def _bits(x: jax.Array) -> jax.Array:
    """The elements' bits as uint32; of eight bytes, two integers."""
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _mixed(h: jax.Array) -> jax.Array:
    """A permutation of the integers below 2^32 in which every bit depends on every other (the constants are those of C.
    Wellons' search for hash functions of little bias, 2018)."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)


def _on_device(x: Any) -> Any:
    """An array that lies in host memory, brought to its devices."""
    if not isinstance(x, jax.Array):
        return x
    device: Any = next(iter(x.sharding.device_set))
    kind = device.default_memory().kind
    return x if x.sharding.memory_kind in (None, kind) else jax.device_put(x, x.sharding.with_memory_kind(kind))


def drifted(params: Any, stacked: bool = False) -> list[int]:
    """The numbers of the processes whose copy of a parameter differs from what most others have; empty where all agree.

    Compared are the parts that lie on several devices. stacked: the first axis is that of the devices, as ``pmap`` has it.
    Every process must call it; all get the same answer.
    """
    devices = {device: number for number, device in enumerate(jax.devices())}
    leaves = jax.tree.leaves(params)
    mine = np.zeros((len(leaves), len(devices)), np.uint32)
    shards = [(row, shard) for row, x in enumerate(leaves) for shard in x.addressable_shards]
    pending = [(row, devices[shard.device], digest(shard.data)) for row, shard in shards]
    for row, column, value in pending:
        mine[row, column] = int(value)
    # Each process knows the columns of its own devices, the others are 0: the sum is the whole table.
    table = multihost.all_of(mine).reshape(-1, *mine.shape).sum(0, dtype=np.uint32)
    wrong: set[int] = set()
    for row, x in enumerate(leaves):
        copies: dict[str, list[Any]] = {}
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            copies.setdefault(str(index[1:] if stacked else index), []).append(device)
        for holders in copies.values():
            values = [int(table[row, devices[device]]) for device in holders]
            usual = max(values, key=values.count)
            wrong |= {device.process_index for device, value in zip(holders, values, strict=True) if value != usual}
    return sorted(wrong)
