"""The training step: one pure ``update(state, batch) -> (state, metrics)``, the same under every placement."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from jaxformer.config import ModelConfig
from jaxformer.nn import model
from jaxformer.parallel.placement import over_devices, own_key, row_count
from jaxformer.parallel.sharding import shardings
from jaxformer.training.balance import nonzero
from jaxformer.training.master import follower, keeps_master
from jaxformer.training.objective import Objective, call, mean_metrics

log = logging.getLogger(__name__)


@struct.dataclass
class TrainState:
    """All that training carries from step to step."""

    step: jax.Array
    """int32 []: updates done."""
    params: Any
    opt_state: Any
    rng: jax.Array
    """Typed key; a step's randomness is a function of it and ``step``."""


def init_state(params: Any, optimizer: optax.GradientTransformation, rng: jax.Array) -> TrainState:
    """The state before the first update. rng: the key that all randomness of training (dropout) comes from.

    Raises ValueError for parameters that hold no arrays. Optimizers of ``training.optimizer`` train parameters below float32 by
    a float32 master copy; others need ``training.with_master(optimizer)``, without which small updates are lost.
    """
    leaves = jax.tree.leaves(params)
    if not leaves:
        raise ValueError(f"params must be a nested dict of arrays, as jf.init returns, not {type(params).__name__}")
    opt_state = optimizer.init(params)
    if any(map(_is_low, leaves)) and not keeps_master(opt_state):
        log.warning("parameters of less than float32 precision lose small updates; use training.with_master(optimizer)")
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, rng)


def make_update(
    objective: Objective, optimizer: optax.GradientTransformation, microbatches: int = 1
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]:
    """``update(state, batch) -> (state, metrics)``, pure: for ``jax.jit``, or for a placement (``jit``, ``pmap``, ``mesh``).

    It minimises the objective's total over its weight, both summed over the whole step: over all microbatches and devices.
    batch: a dict of arrays whose first axis is the rows. microbatches: equal parts that the rows are computed in, one by one.

    metrics: those of the objective (``loss`` and ``weight`` at least), ``grad_norm`` (before the optimizer's clipping),
    ``nonfinite`` and, where the optimizer has a function ``learning_rate(step)`` as that of ``training.optimizer``, ``lr``.

    Where the gradient is not finite, the update leaves the parameters and the optimizer's state as they were, and only the step
    goes on. ``nonfinite`` is then the number of the first parameter that it is not finite for, counted from 1 in the order of
    ``jax.tree.leaves(params)``; else it is 0.

    Raises ValueError, when it is traced, for an objective that returns something else, and rows that do not divide.
    """
    if microbatches < 1:
        raise ValueError(f"microbatches={microbatches} must be at least 1")
    known_weight = getattr(objective, "weight", None)
    after_update = getattr(objective, "after_update", lambda params, sums: params)
    learning_rate, follow = getattr(optimizer, "learning_rate", None), follower(optimizer)

    def update(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        rng = own_key(jax.random.fold_in(state.rng, state.step))
        # A weight that is known beforehand scales the loss itself, else the finished sum of gradients is scaled.
        scale = 1.0 / nonzero(over_devices(known_weight(batch))) if known_weight else 1.0

        def scaled(params, microbatch, part_rng):
            total, sums = call(objective, params, microbatch, part_rng)
            return total * scale, sums

        gradient = jax.grad(scaled, has_aux=True)
        grads, sums = over_devices(_accumulate(gradient, state.params, batch, rng, microbatches))
        weight = 1.0 if known_weight else nonzero(sums["weight"])
        # Sums of gradients are float32 until here: float16 may not hold them before they are divided.
        grads = jax.tree.map(lambda x, p: (x if known_weight else x / weight).astype(p.dtype), grads, state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        norm, nonfinite = _norm(float32(grads))
        metrics = mean_metrics(objective, sums) | {"grad_norm": norm, "nonfinite": nonfinite}
        if learning_rate:
            metrics["lr"] = learning_rate(state.step)
        updated = optax.apply_updates(state.params, updates)
        params = after_update(updated, sums)
        if params is not updated:
            opt_state = follow(opt_state, updated, params)
        before, after = (state.params, state.opt_state), (params, opt_state)
        params, opt_state = jax.tree.map(lambda new, old: jnp.where(nonfinite == 0, new, old), after, before)
        return dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state), metrics

    return update


def _norm(grads: Any) -> tuple[jax.Array, jax.Array]:
    """The global norm of a gradient, and 0 if it is finite, else the number of the first leaf that is not, from 1; where only
    the sum over all leaves is not, of the largest."""
    squares = [jnp.sum(jnp.square(x)) for x in jax.tree.leaves(grads)]
    norm = jnp.sqrt(sum(squares))
    sizes = jnp.stack([jnp.where(jnp.isnan(x), jnp.inf, x) for x in squares])
    return norm, jnp.where(jnp.isfinite(norm), 0, 1 + jnp.argmax(sizes).astype(jnp.int32))


def float32(tree: Any) -> Any:
    """``tree``, what is stored in less than float32 in float32: squares and sums would overflow or be rounded away."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if _is_low(x) else x, tree)


def _is_low(x: Any) -> bool:
    """Whether an array holds floating-point numbers below float32."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4


def _accumulate(gradient, params, batch, rng, microbatches):
    """``gradient(params, part, rng)``, summed over ``microbatches`` equal parts of the rows, one after another, in float32 at
    least."""
    rows = row_count(batch)
    if microbatches == 1:
        return gradient(params, batch, rng)
    if rows % microbatches:
        raise ValueError(f"a batch of {rows} rows cannot be split into {microbatches} equal microbatches")
    # Every microbatch takes every n-th row, so that each device has its share of each.
    parts = jax.tree.map(lambda x: x.reshape(rows // microbatches, microbatches, *x.shape[1:]).swapaxes(0, 1), batch)

    def add(total, numbered):
        index, microbatch = numbered
        return jax.tree.map(jnp.add, total, gradient(params, microbatch, jax.random.fold_in(rng, index))), None

    def zeros(x):  # sums of gradients below float32 would lose what is below the sum's own rounding
        return jnp.zeros(x.shape, jnp.float32 if _is_low(x) else x.dtype)

    abstract = jax.eval_shape(gradient, params, jax.tree.map(lambda x: x[0], parts), rng)
    return jax.lax.scan(add, jax.tree.map(zeros, abstract), (jnp.arange(microbatches), parts))[0]


def param_shardings(cfg: ModelConfig, mesh: Mesh) -> Any:
    """A ``NamedSharding`` for every parameter of ``cfg``'s model, as the placement ``mesh`` takes them."""
    return shardings(model.spec(cfg), cfg, mesh)
