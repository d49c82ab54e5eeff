"""Rows that are sorted by expert, to the devices along the axis ``expert`` that own the experts, and back.

All here runs inside ``shard_map``. All devices know how many rows each has for each expert, and so where every slice of them
goes. Owners keep what they get sorted by expert, then by sender. Accelerators send just these rows
(``jax.lax.ragged_all_to_all``); XLA's CPU backend lacks that, and sends as many between any two devices as there could be.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.parallel.sharding import platform

AXIS = "expert"


class Slices(NamedTuple):
    """int32 [sender, owner, expert of the owner]."""

    size: jax.Array
    """Rows."""
    at_sender: jax.Array
    """Where they begin among their sender's."""
    at_owner: jax.Array
    """Where they begin among their owner's."""


def slices(sizes_E: jax.Array) -> Slices:
    """Of all devices, each of which has ``sizes_E`` rows for the experts."""
    counts = jax.lax.all_gather(sizes_E, AXIS)
    size = counts.reshape(len(counts), len(counts), -1)
    total = size.sum(0)
    return Slices(size, _before(counts, 1).reshape(size.shape), _before(total, 1) + _before(size, 0))


def window(every: Slices, first: jax.Array | int, room: int) -> Slices:
    """What of them is among the ``room`` rows from ``first`` on of their owner's; these rows, counted from there."""
    begin, end = (jnp.clip(at, first, first + room) for at in (every.at_owner, every.at_owner + every.size))
    return Slices(end - begin, every.at_sender + begin - every.at_owner, begin - first)


def received(moved: Slices) -> jax.Array:
    """[E / owners]: rows for each of this device's experts."""
    return moved.size[:, jax.lax.axis_index(AXIS)].sum(0)


def to_owners(x_MD: jax.Array, moved: Slices, room: int) -> jax.Array:
    """This device's rows -> [room, D], those for its experts, then zeros."""
    return _move(x_MD, moved, (len(x_MD), room), True)


def to_sources(y: jax.Array, moved: Slices, rows: int) -> jax.Array:
    """[room, D] as ``to_owners`` gives them -> [rows, D], back where they came from; 0 for rows that are in no slice. What is
    left of the room is not read."""
    return _move(y, moved, (len(y), rows), False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _move(x, moved, lengths, outward):
    me = jax.lax.axis_index(AXIS)
    mine, theirs = Slices(*(table[me] for table in moved)), Slices(*(table[:, me] for table in moved))
    if outward:
        tables = mine.size, mine.at_sender, mine.at_owner, theirs.size, theirs.at_owner
    else:
        tables = theirs.size, theirs.at_owner, theirs.at_sender, mine.size, mine.at_sender
    ragged, padded = (functools.partial(way, length=lengths[1]) for way in (_ragged, _padded))
    if platform() == "cpu":
        return padded(x, *tables)
    return jax.lax.platform_dependent(x, *tables, cpu=padded, default=ragged)


def _move_forward(x, moved, lengths, outward):
    return _move(x, moved, lengths, outward), moved


def _move_backward(lengths, outward, moved, g):
    # Rows move and are not changed: one way is the other's transpose. (What JAX derives also sends offsets.)
    return _move(g, moved, lengths[::-1], not outward), None


_move.defvjp(_move_forward, _move_backward)


def _ragged(x, sent, begins, lands, received, starts, *, length):
    slices = (table.reshape(-1) for table in (begins, sent, lands, received))
    return jax.lax.ragged_all_to_all(x, jnp.zeros((length, x.shape[1]), x.dtype), *slices, axis_name=AXIS)


def _padded(x, sent, begins, lands, received, starts, *, length):
    most = min(len(x), length)
    rows = x.at[_rows(sent, begins, most, len(x))].get(mode="fill", fill_value=0)
    rows = jax.lax.all_to_all(rows, AXIS, 0, 0)
    result = jnp.zeros((length, x.shape[1]), x.dtype)
    return result.at[_rows(received, starts, most, length)].set(rows, mode="drop")


def _rows(sizes, starts, count, none):
    """[devices, count]: the numbers of each device's rows, [devices, slices] of them one slice after another; then ``none``."""
    ends, at = jnp.cumsum(sizes, 1), jnp.arange(count)
    which = (at[:, None] >= ends[:, None]).sum(-1)
    shift = jnp.take_along_axis(starts - ends + sizes, jnp.minimum(which, sizes.shape[1] - 1), 1)
    return jnp.where(which < sizes.shape[1], shift + at, none)


def _before(sizes, axis):
    return jnp.cumsum(sizes, axis) - sizes
