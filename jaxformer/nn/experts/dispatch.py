"""Tokens to their experts and back, on one device or on a mesh.

On a mesh (``jax.set_mesh``) each device sorts its own tokens, [T, D] here, and owns some of the experts: those of its place
along the axis ``expert``. Rows (M: (token, chosen expert) pairs) go there and back by an all-to-all. Weights are
brought together over ``fsdp`` alone; F stays spread over ``tensor``, whose partial results are summed.

Dropless is exact for any load. Shapes are fixed, and the most that could come to one device is all that its experts could be
chosen for, owners · T · min(J, E / owners) rows. It has room for two even shares, 2 · T · J, and where
more come to any device, all go through another round, as often as it takes. Accelerators send the rows that there are, and the
Pallas kernel multiplies those alone: the step waits for the device with the highest load. Capacity sends and multiplies the
same for any load, and leaves out what has no room.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxformer.config import Experts, ModelConfig
from jaxformer.nn import mlp
from jaxformer.nn.experts import exchange
from jaxformer.nn.experts.ragged import TILE, ragged_dot
from jaxformer.nn.named import multiply
from jaxformer.parallel import sharding
from jaxformer.parallel.sharding import AXES, PARAMETERS, ROWS, gathered, partition_spec

WEIGHTS = {"gate": "EDF", "up": "EDF", "down": "EFD"}
TOKENS = PartitionSpec(ROWS, "context")
"""Where [B, T, ...] lies."""


def apply(
    params: dict,
    x_BTD: jax.Array,
    expert_BTJ: jax.Array,
    weight_BTJ: jax.Array,
    valid_BT: jax.Array,
    cfg: ModelConfig,
    limited: bool,
) -> tuple[jax.Array, jax.Array]:
    """What the experts make of tokens [B, T, D], weighted and added up; and bool [B, T, J], which choices had room.

    limited: by ``expert_dispatch="capacity"``. A batch that does not divide by the mesh's axes of rows and ``context``,
    as a step of decoding may not, or experts that do not by ``expert``, are left to XLA's partitioner: the same numbers, with
    more to send.
    """
    weights = {name: params[name].astype(x_BTD.dtype) for name in WEIGHTS}
    mesh = sharding.current()
    local = functools.partial(_local, cfg=cfg, limited=limited)
    if mesh is None or not divides(x_BTD, cfg.experts, mesh):
        weights = {name: gathered(weight, WEIGHTS[name]) for name, weight in weights.items()}
        y_BTD, kept_BTJ = local(weights, x_BTD, expert_BTJ, weight_BTJ, valid_BT)
        return y_BTD.astype(x_BTD.dtype), kept_BTJ
    specs = {name: partition_spec(WEIGHTS[name], weight.shape, PARAMETERS, mesh) for name, weight in weights.items()}

    def on_device(weights, *rows):
        weights = {name: _unsharded(weight, specs[name]) for name, weight in weights.items()}
        y_BTD, kept_BTJ = local(weights, *rows, owners=mesh.shape["expert"])
        return y_BTD[None], kept_BTJ

    # The devices of tensor have a part of F each. Their parts are added up outside, where the sum's gradient is a plain copy.
    parts = PartitionSpec(specs["gate"][2], *TOKENS)
    # check_vma: the Pallas kernel does not say what its result varies over.
    spread = jax.shard_map(
        on_device, in_specs=(specs, TOKENS, TOKENS, TOKENS, TOKENS), out_specs=(parts, TOKENS), check_vma=False
    )
    y, kept_BTJ = spread(weights, x_BTD, expert_BTJ, weight_BTJ, valid_BT)
    return y.sum(0).astype(x_BTD.dtype), kept_BTJ


def divides(x_BTD: jax.Array, experts: Experts, mesh: Any) -> bool:
    """Whether every device of the mesh has as many tokens and experts as any other."""
    return _even(x_BTD, mesh) and experts.n_experts % mesh.shape["expert"] == 0


def _even(x_BTD, mesh):
    return not (x_BTD.shape[0] % math.prod(mesh.shape[axis] for axis in ROWS) or x_BTD.shape[1] % mesh.shape["context"])


def by_token(f: Callable[[jax.Array], jax.Array], x_BTE: jax.Array) -> jax.Array:
    """``f(x)``, of every device's own tokens: XLA would bring all of them together for a ``top_k``."""
    mesh = sharding.current()
    if mesh is None or not _even(x_BTE, mesh):
        return f(x_BTE)
    return jax.shard_map(f, in_specs=TOKENS, out_specs=TOKENS)(x_BTE)


def _unsharded(weight, specs):
    """A device's shard of a weight, with what lies on fsdp brought together. Its gradient is summed as it is spread again."""
    for axis, name in enumerate(specs):
        if name == "fsdp":
            weight = jax.lax.all_gather(weight, name, axis=axis, tiled=True)
    return weight


def _local(weights, x_BTD, expert_BTJ, weight_BTJ, valid_BT, *, cfg, limited, owners=1):
    """On one device, of ``owners`` that share the experts; float32."""
    x_TD, weight_TJ = (x.reshape(-1, x.shape[-1]) for x in (x_BTD, weight_BTJ))
    run = _capacity if limited else _dropless
    y_MD, kept_TJ = run(weights, x_TD, expert_BTJ.reshape(weight_TJ.shape), valid_BT.reshape(-1), cfg, owners)
    y_TJD = y_MD.reshape(*weight_TJ.shape, -1)
    y_TD = multiply("TJD,TJ->TD", y_TJD, weight_TJ, name="mixed", preferred_element_type=jnp.float32)
    return y_TD.reshape(x_BTD.shape), kept_TJ.reshape(expert_BTJ.shape)


def _dropless(weights, x_TD, expert_TJ, valid_T, cfg, owners):
    number, choices = cfg.experts.n_experts, cfg.experts.per_token
    expert_M = expert_TJ.reshape(-1)
    order_M = jnp.argsort(expert_M, stable=True)
    sizes_E = jnp.bincount(expert_M, length=number).astype(jnp.int32)
    x_MD = x_TD[order_M // choices]
    if owners == 1:
        y_MD = _experts(weights, x_MD, functools.partial(ragged_dot, sizes=sizes_E), cfg)
    else:
        # A token's choices are different experts: no more of them can be one device's than it has experts.
        most = owners * len(x_TD) * min(choices, number // owners)
        y_MD = _at_owners(weights, x_MD, sizes_E, cfg, most)
    return y_MD[jnp.argsort(order_M)], jnp.ones(expert_TJ.shape, bool)


def _at_owners(weights, x_MD, sizes_E, cfg, most):
    """Every row by its expert, where that is owned: ``most`` rows may come to one device, which takes as many at a time as it
    has room for."""
    every, size = exchange.slices(sizes_E), room(len(x_MD), most)
    some = functools.partial(_round, cfg=cfg, size=size)
    y_MD = some(weights, x_MD, every, 0)
    if size == most:
        return y_MD
    # All devices go through as many rounds, as those of one collective must.
    highest = jax.lax.pmax(every.size.sum((0, 2)).max(), AXES)
    return y_MD + _more(some, weights, x_MD, every, -(-highest // size))


def _round(weights, x_MD, every, number, *, cfg, size):
    """[M, D]: of the rows that this round is for; 0 of the others."""
    moved = exchange.window(every, number * size, size)
    product = functools.partial(ragged_dot, sizes=exchange.received(moved))
    return exchange.to_sources(_experts(weights, exchange.to_owners(x_MD, moved, size), product, cfg), moved, len(x_MD))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _more(some, weights, x_MD, every, rounds):
    """Rounds 1 to ``rounds``, added up: how many there are is known as late as they run. For the gradient each is run again, as
    what all would keep takes the room of the most that could come."""
    add = lambda number, y_MD: y_MD + some(weights, x_MD, every, number)
    return jax.lax.fori_loop(1, rounds, add, jnp.zeros_like(x_MD))


def _more_forward(some, *arguments):
    return _more(some, *arguments), arguments


def _more_backward(some, arguments, g_MD):
    weights, x_MD, every, rounds = arguments

    def add(number, total):
        back = jax.vjp(lambda *arguments: some(*arguments, every, number), weights, x_MD)[1]
        return jax.tree.map(jnp.add, total, back(g_MD))

    return *jax.lax.fori_loop(1, rounds, add, jax.tree.map(jnp.zeros_like, (weights, x_MD))), None, None


_more.defvjp(_more_forward, _more_backward)


def room(rows: int, most: int) -> int:
    """Rows that a device has room for at a time, where each sends ``rows``: two even shares, in whole tiles of the kernel."""
    return min(most, -(-2 * rows // TILE) * TILE)


def _capacity(weights, x_TD, expert_TJ, valid_T, cfg, owners):
    """Each expert takes C of this device's tokens, ``expert_capacity`` even shares of them: on a mesh it may drop a token
    that it would take on one device, where its capacity is for all tokens together. Where none is dropped, the numbers agree.

    First choices of all tokens come first, then second ones: who is late is less wanted. So a token's second choice depends on
    the first ones of later tokens, which no causal model may do when it generates: capacity acts in training alone.
    """
    experts = cfg.experts
    tokens, choices = expert_TJ.shape
    room = max(1, -int(-cfg.execution.expert_capacity * tokens * choices // experts.n_experts))
    expert_JT = expert_TJ.T
    is_mine = (expert_JT[..., None] == jnp.arange(experts.n_experts)) & valid_T[:, None]
    before = jnp.cumsum(is_mine.reshape(-1, experts.n_experts), axis=0, dtype=jnp.int32).reshape(is_mine.shape) - is_mine
    place_JT = jnp.take_along_axis(before, expert_JT[..., None], axis=-1)[..., 0]
    kept_JT = (place_JT < room) & valid_T
    slot_M = jnp.where(kept_JT, expert_JT * room + place_JT, experts.n_experts * room).reshape(-1)
    token_M = jnp.tile(jnp.arange(tokens), choices)
    rooms = jnp.zeros((experts.n_experts * room, x_TD.shape[-1]), x_TD.dtype).at[slot_M].set(x_TD[token_M], mode="drop")

    product = functools.partial(multiply, "ECD,EDF->ECF")

    rooms_ECD = _to_owners(rooms.reshape(experts.n_experts, room, -1), owners)
    y_ECD = _to_sources(_experts(weights, rooms_ECD, product, cfg), owners)
    y_MD = y_ECD.reshape(rooms.shape).at[slot_M].get(mode="fill", fill_value=0)
    y_MD = jnp.swapaxes(y_MD.reshape(choices, tokens, -1), 0, 1).reshape(tokens * choices, -1)
    return y_MD, kept_JT.T


def _to_owners(x_ECD, owners):
    """The rooms of all experts on this device -> those of this device's experts on all."""
    return x_ECD if owners == 1 else jax.lax.all_to_all(x_ECD, "expert", 0, 1, tiled=True)


def _to_sources(x_ECD, owners):
    return x_ECD if owners == 1 else jax.lax.all_to_all(x_ECD, "expert", 1, 0, tiled=True)


def _experts(weights, x, product, cfg):
    """Every row by its own expert; ``product(rows, weights)`` knows which that is."""
    hidden = mlp.GATES[cfg.mlp](product(x, weights["gate"], name="gate")) * product(x, weights["up"], name="up")
    return product(hidden, weights["down"], name="down")
