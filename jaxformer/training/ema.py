"""A running mean of the parameters beside them (Polyak & Juditsky 1992), which is often the better model."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Tree = Any


class EmaState(NamedTuple):
    """The state of ``with_ema``."""

    updates: jax.Array
    """int32 []: updates done."""
    ema: Tree
    """The mean of the parameters, float32."""
    inner: Any
    """The optimizer's own state."""


def with_ema(inner: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """``inner``, whose state holds the mean of the parameters after each update, weighted by ``decay`` to the power of their
    age in updates (the weights add up to 1 from the first update on). Before it, the mean is the parameters."""

    def init(params):
        ema = jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)  # no buffer may be donated twice
        return EmaState(jnp.zeros([], jnp.int32), ema, inner.init(params))

    def update(updates, state, params):
        updates, inner_state = inner.update(updates, state.inner, params)
        count = optax.safe_increment(state.updates)
        mass = lambda n: -jnp.expm1(n * math.log(decay))  # 1 − decayⁿ, the sum of n weights times 1 − decay
        kept = decay * mass(count - 1) / mass(count)
        averaged = lambda ema, p, u: ema + (1 - kept) * (p.astype(ema.dtype) + u - ema)
        return updates, EmaState(count, jax.tree.map(averaged, state.ema, params, updates), inner_state)

    return optax.GradientTransformation(init, update)


def ema_params(opt_state: Any, params: Tree) -> Tree:
    """The parameters to evaluate and to load: their running mean, in their dtypes, where the optimizer keeps one; else
    ``params``."""
    if not isinstance(opt_state, EmaState):
        return params
    return jax.tree.map(lambda ema, p: ema.astype(p.dtype), opt_state.ema, params)
