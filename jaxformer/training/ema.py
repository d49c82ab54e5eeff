"""A running mean of the parameters beside them (Polyak & Juditsky 1992), which is often the better model."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxformer.training.master import Following, follower, following

Tree = Any


class EmaState(NamedTuple):
    """The state of ``with_ema``."""

    updates: jax.Array
    """int32 []: updates done."""
    ema: Tree
    """The mean of the parameters, float32."""
    inner: Any
    """The optimizer's own state."""


def with_ema(inner: optax.GradientTransformation, decay: float) -> Following:
    """``inner``, whose state holds the mean of the parameters after each update, weighted by ``decay`` to the power of their
    age in updates (the weights add up to 1 from the first update on). Before it, the mean is the parameters."""

    def init(params):
        ema = jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)  # no buffer may be donated twice
        return EmaState(jnp.zeros([], jnp.int32), ema, inner.init(params))

    def update(updates, state, params):
        updates, inner_state = inner.update(updates, state.inner, params)
        count = optax.safe_increment(state.updates)
        averaged = lambda ema, p, u: ema + newest(count) * (p.astype(ema.dtype) + u - ema)
        return updates, EmaState(count, jax.tree.map(averaged, state.ema, params, updates), inner_state)

    def newest(count):  # the weight of the newest parameters in a mean over count updates
        mass = lambda n: -jnp.expm1(n * math.log(decay))  # 1 − decayⁿ, the sum of n weights times 1 − decay
        return 1 - decay * mass(count - 1) / mass(count)

    def follow(state, before, after):
        moved = lambda ema, p, q: ema + newest(state.updates) * (q.astype(ema.dtype) - p.astype(ema.dtype))
        ema = jax.tree.map(moved, state.ema, before, after)
        return EmaState(state.updates, ema, follower(inner)(state.inner, before, after))

    return following(optax.GradientTransformation(init, update), follow)


def ema_params(opt_state: Any, params: Tree) -> Tree:
    """The parameters to evaluate and to load: their running mean, in their dtypes and where they lie, if the optimizer keeps
    one; else ``params``."""
    if not isinstance(opt_state, EmaState):
        return params

    def like(ema, p):
        in_host = not isinstance(ema, jax.core.Tracer) and ema.sharding.memory_kind != p.sharding.memory_kind
        return (jax.device_put(ema, p.sharding) if in_host else ema).astype(p.dtype)

    return jax.tree.map(like, opt_state.ema, params)
