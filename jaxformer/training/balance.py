"""What keeps experts in use: the load-balancing loss, the z-loss of routers, the selection bias that can stand in for them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.config import Execution

Sums = dict[str, jax.Array]


def collect(routing: Sequence[Sums]) -> Sums:
    """What the layers of experts did, stacked: load and probability [L, E]; log_z2, tokens, dropped [L]."""
    return {name: jnp.stack([layer[name] for layer in routing]) for name in routing[0]}


def balance(sums: Sums) -> jax.Array:
    """[L]: E·Σ f·P of each layer by itself, f the share of the choices that an expert got and P its mean probability (Fedus et
    al. 2021, eq. 4, for several choices). 1 for an even load; up to E for one expert that gets all."""
    number = sums["load"].shape[-1]
    share = sums["load"] / _some(sums["load"].sum(-1, keepdims=True))
    return number * (share * sums["probability"]).sum(-1) / _some(sums["tokens"])


def penalty(sums: Sums, execution: Execution, axis_name: str | None = None) -> jax.Array:
    """The weighted losses of balance and z, averaged over layers: this device's part, of those of ``axis_name``, which add up.

    The load has no gradient, and is that of all devices; what is left is a sum over tokens.
    """
    load, tokens = (jax.lax.stop_gradient(sums[name]) for name in ("load", "tokens"))
    if axis_name is not None:
        load, tokens = jax.lax.psum((load, tokens), axis_name)
    even = balance(sums | {"load": load, "tokens": tokens}).mean()
    return execution.balance_loss * even + execution.router_z_loss * (sums["log_z2"] / _some(tokens)).mean()


def metrics(sums: Sums) -> Sums:
    """Scalars: balance (of the layers' mean); load_max and load_min, of any expert of any layer over the mean; load_entropy, 1
    for an even load; dropped, the share of choices without room."""
    load = sums["load"]
    mean = _some(load.mean(-1, keepdims=True))
    share = load / _some(load.sum(-1, keepdims=True))
    entropy = -(share * jnp.log(jnp.where(share > 0, share, 1.0))).sum(-1) / jnp.log(max(load.shape[-1], 2))
    return {
        "balance": balance(sums).mean(),
        "load_max": (load / mean).max(),
        "load_min": (load / mean).min(),
        "load_entropy": entropy.mean(),
        "dropped": sums["dropped"].sum() / _some(load.sum()),
    }


def move_bias(params: Any, load_LE: jax.Array, rate: float) -> Any:
    """Parameters whose selection biases are ``rate`` higher for experts with less than their layer's mean load, and lower for
    those with more (Wang et al. 2024, algorithm 1). load_LE: of the decoder's layers, and of the block of ``mtp``, if any."""
    moves = rate * jnp.sign(load_LE.mean(-1, keepdims=True) - load_LE)
    decoder = params["decoder"]
    moe = decoder["layers"]["moe"]
    layers = decoder["layers"] | {"moe": moe | {"bias": moe["bias"] + moves[: len(moe["bias"])]}}
    params = params | {"decoder": decoder | {"layers": layers}}
    if len(moves) == len(moe["bias"]):
        return params
    layer = params["mtp"]["layer"]
    layer = layer | {"moe": layer["moe"] | {"bias": layer["moe"]["bias"] + moves[-1]}}
    return params | {"mtp": params["mtp"] | {"layer": layer}}


def _some(x: jax.Array) -> jax.Array:
    return jnp.where(x == 0.0, 1.0, x)
