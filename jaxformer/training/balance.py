"""What keeps all experts in use: the load-balancing loss, the z-loss of routers, and the selection bias as an alternative."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.config import Execution
from jaxformer.parallel.placement import over_devices

Sums = dict[str, jax.Array]


def collect(routing: Sequence[Sums]) -> Sums:
    """The sums of all layers with experts, stacked: load and probability [L, E]; log_z2, tokens, dropped [L]."""
    return {name: jnp.stack([layer[name] for layer in routing]) for name in routing[0]}


def balance(sums: Sums) -> jax.Array:
    """[L]: E·Σ f·P per layer, where f is the share of the choices that an expert got and P its mean probability (Fedus et
    al. 2021, eq. 4, for several choices). 1 for an even load, up to E where one expert gets every token."""
    n_experts = sums["load"].shape[-1]
    share = sums["load"] / nonzero(sums["load"].sum(-1, keepdims=True))
    return n_experts * (share * sums["probability"]).sum(-1) / nonzero(sums["tokens"])


def penalty(sums: Sums, execution: Execution) -> jax.Array:
    """The weighted losses of balance and z, averaged over layers. Inside ``pmap``, this device's share; the shares add up.

    The load has no gradient, and is that of all devices; what is left is a sum over tokens.
    """
    load, tokens = over_devices(tuple(jax.lax.stop_gradient(sums[name]) for name in ("load", "tokens")))
    even = balance(sums | {"load": load, "tokens": tokens}).mean()
    return execution.balance_loss * even + execution.router_z_loss * (sums["log_z2"] / nonzero(tokens)).mean()


def metrics(sums: Sums) -> Sums:
    """Scalars: balance, averaged over layers; load_max and load_min, the highest and lowest load of any expert relative to its
    layer's mean; load_entropy, 1 for an even load; dropped, the share of choices that found no room."""
    load = sums["load"]
    mean = nonzero(load.mean(-1, keepdims=True))
    share = load / nonzero(load.sum(-1, keepdims=True))
    entropy = -(share * jnp.log(jnp.where(share > 0, share, 1.0))).sum(-1) / jnp.log(max(load.shape[-1], 2))
    return {
        "balance": balance(sums).mean(),
        "load_max": (load / mean).max(),
        "load_min": (load / mean).min(),
        "load_entropy": entropy.mean(),
        "dropped": sums["dropped"].sum() / nonzero(load.sum()),
    }


def move_bias(params: Any, load_LE: jax.Array, rate: float) -> Any:
    """``params`` with selection biases ``rate`` higher for experts with less than their layer's mean load, and ``rate`` lower
    for those with more (Wang et al. 2024, algorithm 1). load_LE has the decoder's layers, then the block of ``mtp``, if any."""
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


def nonzero(total: Any) -> Any:
    """``total``, or 1 where it is 0: a mean of nothing is then 0, not 0 / 0."""
    return jnp.where(total == 0.0, 1.0, total)
