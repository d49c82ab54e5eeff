"""Rows that are sorted by expert, to the devices along the axis ``expert`` that own the experts, and back.

All here runs inside ``shard_map``. counts [owners, E] int32: rows that each device has for each expert; all devices know
them, and so where everything goes. Owners keep what they get sorted by expert, then by sender. Accelerators send
just these rows (``jax.lax.ragged_all_to_all``); XLA's CPU backend lacks that, and sends as many for each pair of devices as
there could be.
"""

import functools

import jax
import jax.numpy as jnp

from jaxformer.sharding import platform

AXIS = "expert"


def own(counts: jax.Array) -> jax.Array:
    """[owners, E / owners]: of the counts, those of this device's experts."""
    return _by_owner(counts)[:, jax.lax.axis_index(AXIS)]


def to_owners(x_MD: jax.Array, counts: jax.Array, room: int) -> jax.Array:
    """This device's rows -> [room, D], those for its experts. What is left of the room is 0.

    room: a multiple of ``owners``. No device may have more than ``room / owners`` rows for any other.
    """
    return _move(x_MD, counts, (len(x_MD), room), True)


def to_sources(y: jax.Array, counts: jax.Array, rows: int) -> jax.Array:
    """[room, D] as ``to_owners`` gives them -> [rows, D], back where they came from. What is left of the room is not read."""
    return _move(y, counts, (len(y), rows), False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _move(x, counts, sizes, outward):
    ways = (_ragged_to_owners, _padded_to_owners) if outward else (_ragged_to_sources, _padded_to_sources)
    ragged, padded = (functools.partial(way, size=sizes[1]) for way in ways)
    if platform() == "cpu":
        return padded(x, counts)
    return jax.lax.platform_dependent(x, counts, cpu=padded, default=ragged)


def _move_forward(x, counts, sizes, outward):
    return _move(x, counts, sizes, outward), counts


def _move_backward(sizes, outward, counts, g):
    # Rows move and are not changed: one way is the other's transpose. (What JAX derives sends offsets besides.)
    return _move(g, counts, sizes[::-1], not outward), None


_move.defvjp(_move_forward, _move_backward)


def _by_owner(counts):
    return counts.reshape(len(counts), len(counts), -1)  # sender, owner, expert of the owner


def _before(counts, axis):
    return jnp.cumsum(counts, axis) - counts


def _starts(counts):
    """[sender, owner, expert of the owner]: where each slice begins among its sender's rows, and among its owner's."""
    by_owner = _by_owner(counts)
    total = by_owner.sum(0)
    return _before(counts, 1).reshape(by_owner.shape), _before(total, 1) + _before(by_owner, 0)


def _ragged_to_owners(x, counts, size):
    me = jax.lax.axis_index(AXIS)
    at_sender, at_owner = _starts(counts)
    output = jnp.zeros((size, x.shape[1]), x.dtype)
    slices = at_sender[me], counts[me], at_owner[me], own(counts)
    return jax.lax.ragged_all_to_all(x, output, *(s.reshape(-1) for s in slices), axis_name=AXIS)


def _ragged_to_sources(y, counts, size):
    me = jax.lax.axis_index(AXIS)
    at_sender, at_owner = _starts(counts)
    output = jnp.zeros((size, y.shape[1]), y.dtype)
    slices = at_owner[:, me], own(counts), at_sender[:, me], counts[me]
    return jax.lax.ragged_all_to_all(y, output, *(s.reshape(-1) for s in slices), axis_name=AXIS)


def _padded_to_owners(x, counts, size):
    me, owners = jax.lax.axis_index(AXIS), len(counts)
    room, mine, by_owner = size // owners, own(counts), _by_owner(counts)
    starts = _before(by_owner[me].sum(-1), 0)
    sent = _taken(x, by_owner[me].sum(-1, keepdims=True), starts[:, None], room)
    received = jax.lax.all_to_all(sent, AXIS, 0, 0).reshape(size, -1)
    # Of each expert, what each sender had.
    starts = jnp.arange(owners)[:, None] * room + _before(mine, 1)
    return _taken(received, mine.T.reshape(1, -1), starts.T.reshape(1, -1), size)[0]


def _padded_to_sources(y, counts, size):
    me, owners = jax.lax.axis_index(AXIS), len(counts)
    room, by_owner = len(y) // owners, _by_owner(counts)
    sent = _taken(y, own(counts), _starts(counts)[1][:, me], room)
    received = jax.lax.all_to_all(sent, AXIS, 0, 0).reshape(len(y), -1)
    return _taken(received, by_owner[me].sum(-1)[None], jnp.arange(owners)[None] * room, size)[0]


def _taken(x, sizes, starts, rows):
    """[N, rows, D]: for each of N rows of ``sizes`` and ``starts``, those slices of x one after another, then 0."""
    ends, at = jnp.cumsum(sizes, 1), jnp.arange(rows)
    which = (at[:, None] >= ends[:, None]).sum(-1)
    inside = which < sizes.shape[1]
    which = jnp.minimum(which, sizes.shape[1] - 1)
    index = jnp.take_along_axis(starts - ends + sizes, which, 1) + at
    return x.at[jnp.where(inside, index, len(x))].get(mode="fill", fill_value=0)
