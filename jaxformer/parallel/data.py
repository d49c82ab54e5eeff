"""Data parallelism: the rows of a batch over devices, by ``jit`` with shardings or by ``pmap``. (``mesh``: all other ways.)

The same numbers either way, up to the masks of dropout.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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
    """A batch for ``step``."""
    put_evaluation: Callable[[Any], Any]
    """A batch for a jitted function of ``get_state(state)``."""
    get_metrics: Callable[[Any], dict[str, float]]
    within: Callable[[], AbstractContextManager] = contextlib.nullcontext
    """Where everything else that computes with the state has to stand."""


def jit(make_update: Callable[[str | None], Callable], devices: list | None = None) -> Placement:
    """State replicated, rows sharded over ``devices`` (all of them unless given); XLA adds the sums over devices."""
    mesh = Mesh(np.asarray(devices or jax.devices()), (AXIS,))
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(AXIS))

    def put_batch(batch):
        check_rows(batch, mesh.size)
        return jax.device_put(batch, rows)

    return Placement(
        step=jax.jit(make_update(None), donate_argnums=0, out_shardings=(whole, whole)),
        put_state=lambda state: jax.device_put(state, whole),
        begin=lambda fresh, params=None: jax.device_put(fresh(params=params), whole),
        like=lambda state: state,
        get_state=lambda state: state,
        put_batch=put_batch,
        put_evaluation=put_batch,
        get_metrics=lambda metrics: {name: float(value) for name, value in metrics.items()},
    )


def pmap(make_update: Callable[[str | None], Callable], devices: list | None = None) -> Placement:
    """A copy of the state on each device, which sees its own rows; the update adds up over the axis ``"data"``."""
    devices = devices or jax.local_devices()
    count = len(devices)
    each = NamedSharding(Mesh(np.asarray(devices), (AXIS,)), PartitionSpec(AXIS))  # where pmap puts its results

    def put_state(state):
        return jax.device_put(jax.tree.map(lambda x: jax.numpy.stack([x] * count), state), each)

    def put_batch(batch):
        check_rows(batch, count)
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


def check_rows(batch: Any, count: int) -> None:
    """Raises ValueError if the rows cannot be shared out evenly."""
    rows = len(batch["tokens"])
    if rows % count:
        raise ValueError(
            f"batch_size={rows} does not divide by {count} devices; the nearest that does is {-(-rows // count) * count}"
        )
