"""Data parallelism: the rows of a batch over devices, by ``jit`` with shardings or by ``pmap``. (``mesh``: all other ways.)

The same numbers either way, up to the masks of dropout. Of several processes, each has the rows of a batch that its own devices
hold (``own_rows``), whichever those are.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformer.parallel import multihost
from jaxformer.parallel.sharding import ROWS, MeshConfig

AXIS = "data"


@dataclass(frozen=True)
class Placement:
    """How state and batches live on the devices."""

    step: Callable[[Any, Any], tuple[Any, Any]]
    """The compiled update; its first argument's buffers are reused."""
    put_state: Callable[[Any], Any]
    begin: Callable[..., Any]
    """The state that a function makes, of parameters if given."""
    like: Callable[[Any], Any]
    """Of an abstract state, shapes that say where each tensor is to be restored, if not on one device."""
    get_state: Callable[[Any], Any]
    """The state as one device has it."""
    put_batch: Callable[[Any], Any]
    """A batch, or its ``own_rows``, for ``step``."""
    put_evaluation: Callable[[Any], Any]
    """A batch for a jitted function of ``get_state(state)``."""
    get_metrics: Callable[[Any], dict[str, float]]
    compile: Callable[[Callable], Callable] = jax.jit
    """A function of ``get_state(state)`` and batches, whose results every process gets whole."""
    within: Callable[[], AbstractContextManager] = contextlib.nullcontext
    """Where everything else that computes with the state has to stand."""


def jit(make_update: Callable[[str | None], Callable], devices: list | None = None) -> Placement:
    """State replicated, rows sharded over ``devices`` (all of them unless given); XLA adds the sums over devices."""
    mesh = rows_mesh(devices)
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(ROWS))
    step = jax.jit(make_update(None), donate_argnums=0, out_shardings=(whole, whole))
    # Kernels that XLA cannot spread by itself go by the mesh that is set.
    within = (lambda: jax.set_mesh(mesh)) if mesh.size > 1 else contextlib.nullcontext

    def put_batch(batch):
        own, count = row_blocks(mesh)
        check_rows(len(batch["tokens"]) * count // len(own), mesh.size)
        return put_rows(batch, {name: rows for name in batch}, own, count)

    @functools.wraps(step)
    def run(state, batch):
        with within():
            return step(state, batch)

    return Placement(
        step=run,
        put_state=lambda state: multihost.put(state, whole),
        begin=lambda fresh, params=None: multihost.put(fresh(params=params), whole),
        like=lambda state: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), state),
        get_state=lambda state: state,
        put_batch=put_batch,
        put_evaluation=put_batch,
        get_metrics=lambda metrics: {name: float(value) for name, value in metrics.items()},
        compile=lambda function: jax.jit(function, out_shardings=whole),
        within=within,
    )


def pmap(make_update: Callable[[str | None], Callable], devices: list | None = None) -> Placement:
    """A copy of the state on each device, which sees its own rows; the update adds up over the axis ``"data"``."""
    if jax.process_count() > 1:
        raise ValueError("train.parallel='pmap' is for one process; jit, the default, spreads rows over the devices of all")
    devices = devices or jax.local_devices()
    count = len(devices)
    each = NamedSharding(Mesh(np.asarray(devices), (AXIS,)), PartitionSpec(AXIS))  # where pmap puts its results

    def put_state(state):
        return jax.device_put(jax.tree.map(lambda x: jax.numpy.stack([x] * count), state), each)

    def put_batch(batch):
        check_rows(len(batch["tokens"]), count)
        return jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)

    return Placement(
        step=jax.pmap(make_update(AXIS), axis_name=AXIS, devices=devices, donate_argnums=0),
        put_state=put_state,
        begin=lambda fresh, params=None: put_state(fresh(params=params)),
        like=lambda state: state,
        get_state=lambda state: jax.tree.map(lambda x: x.addressable_data(0)[0], state),
        put_batch=put_batch,
        put_evaluation=lambda batch: batch,
        get_metrics=lambda metrics: {name: float(value[0]) for name, value in metrics.items()},
    )


PLACEMENTS = {"jit": jit, "pmap": pmap}


def rows_mesh(devices: list | None = None) -> Mesh:
    """``devices``, or all there are, with rows of a batch on each."""
    return MeshConfig().make(devices)


def check_rows(rows: int, count: int) -> None:
    """Raises ValueError if the rows cannot be shared out evenly."""
    if rows % count:
        raise ValueError(
            f"batch_size={rows} does not divide by {count} devices; the nearest that does is {-(-rows // count) * count}"
        )


def row_blocks(mesh: Mesh) -> tuple[list[int], int]:
    """Into how many blocks a batch's rows are cut on ``mesh``, and the numbers of those that this process's devices hold."""
    axes = [mesh.shape[name] if name in ROWS else 1 for name in mesh.axis_names]
    count = math.prod(axes)
    block = np.broadcast_to(np.arange(count).reshape(axes), mesh.devices.shape)
    own = [number for number, device in zip(block.flat, mesh.devices.flat, strict=True) if device in mesh.local_devices]
    return sorted(set(map(int, own))), count


def own_rows(mesh: Mesh, rows: int) -> np.ndarray | slice:
    """The rows, of so many in a batch, that this process needs. Raises ValueError if they cannot be shared out evenly."""
    own, count = row_blocks(mesh)
    if len(own) == count:
        return slice(None)
    check_rows(rows, count)
    return np.concatenate([np.arange(rows)[number * rows // count :][: rows // count] for number in own])


def put_rows(batch: Any, shardings: dict[str, NamedSharding], own: list[int], count: int) -> dict[str, jax.Array]:
    """A batch on the devices of all processes, of this one's rows: those of the blocks ``own`` of ``count``."""
    if jax.process_count() == 1:
        return jax.device_put(batch, shardings)

    def one(x, sharding):
        size, *rest = x.shape
        size //= len(own)

        def part(index):
            at = own.index((index[0].start or 0) // size) * size
            return x[(slice(at, at + size), *index[1:])]

        return jax.make_array_from_callback((size * count, *rest), sharding, part)

    return {name: one(np.asarray(x), shardings[name]) for name, x in batch.items()}
