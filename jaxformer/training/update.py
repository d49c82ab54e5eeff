"""The training step: one pure ``update(state, batch) -> (state, metrics)``, the same under ``jit`` and ``pmap``."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxformer.config import ModelConfig
from jaxformer.nn import model
from jaxformer.training import balance
from jaxformer.training.objective import Batch, counted_weights, loss_sum, means
from jaxformer.training.optim import OptimConfig, learning_rate, optimizer


@struct.dataclass
class TrainState:
    """All that training carries from step to step."""

    step: jax.Array
    """int32 []: updates done."""
    params: Any
    opt_state: Any
    key: jax.Array
    """Typed key; a step's dropout is a function of it and ``step``."""


def init_state(cfg: ModelConfig, optim: OptimConfig, steps: int, seed: int, params: Any = None) -> TrainState:
    """The state before the first of ``steps`` updates, with fresh parameters unless given."""
    params_key, key = jax.random.split(jax.random.key(seed))
    if params is None:
        params = model.init(cfg, params_key)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer(optim, steps, cfg).init(params), key)


def make_update(
    cfg: ModelConfig,
    optim: OptimConfig,
    steps: int,
    *,
    microbatches: int = 1,
    label_smoothing: float = 0.0,
    loss_chunk: int | None = None,
    mtp_weight: float = 0.3,
    axis_name: str | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """``update(state, batch)``. The loss is a mean over all counted tokens of the step: of every microbatch, and of every
    device of ``axis_name`` (the name of a ``pmap``'s axis).

    metrics: loss, accuracy, weight (counted tokens), grad_norm (before clipping), lr; with experts, those of
    ``balance.metrics``, whose loss each microbatch has for itself.
    """
    experts = cfg.experts
    if experts.n_experts and experts.per_token == 1 and experts.normalize:
        raise ValueError("experts with per_token=1 and normalize=True weigh 1, always: their router would learn nothing")
    transform = optimizer(optim, steps, cfg)
    has_dropout = max(cfg.execution.attention_dropout, cfg.execution.residual_dropout, cfg.execution.embedding_dropout) > 0

    def over_devices(tree):
        return tree if axis_name is None else jax.lax.psum(tree, axis_name)

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(state.key, state.step)
        if axis_name is not None:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
        weight = over_devices(counted_weights(batch).sum())
        scale = 1.0 / jnp.where(weight == 0.0, 1.0, weight)

        def objective(params, part, part_key):
            given: dict[str, Any] = {"label_smoothing": label_smoothing, "chunk": loss_chunk, "axis_name": axis_name}
            given["mtp_weight"] = mtp_weight
            total, sums = loss_sum(params, part, cfg, part_key if has_dropout else None, **given)
            return total * scale, sums

        grads, sums = over_devices(_accumulate(jax.grad(objective, has_aux=True), state.params, batch, key, microbatches))
        updates, opt_state = transform.update(grads, state.opt_state, state.params)
        lr = learning_rate(optim, state.step, steps)
        metrics = means(sums) | {"grad_norm": optax.global_norm(grads), "lr": lr}
        params = optax.apply_updates(state.params, updates)
        if rate := cfg.execution.balance_rate:
            params = balance.move_bias(params, sums["load"], rate)
        return dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state), metrics

    return update


def _accumulate(gradient, params, batch, key, microbatches):
    """``gradient(params, part, key)``, summed over ``microbatches`` equal parts of the rows, one after another."""
    if microbatches == 1:
        return gradient(params, batch, key)
    rows = jnp.shape(batch["tokens"])[0]
    if rows % microbatches:
        raise ValueError(f"a batch of {rows} rows does not divide into {microbatches} microbatches")
    # Every microbatch takes every n-th row, so that each device has its share of each.
    parts = jax.tree.map(lambda x: x.reshape(rows // microbatches, microbatches, *x.shape[1:]).swapaxes(0, 1), batch)

    def add(total, numbered):
        index, part = numbered
        return jax.tree.map(jnp.add, total, gradient(params, part, jax.random.fold_in(key, index))), None

    first = jax.tree.map(lambda x: x[0], parts)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradient, params, first, key))
    return jax.lax.scan(add, zero, (jnp.arange(microbatches), parts))[0]


def make_evaluate(cfg: ModelConfig) -> Callable[[Any, Batch], dict[str, jax.Array]]:
    """``evaluate(params, batch)``: the summed metrics of ``loss_sum``, without dropout and smoothing."""
    return lambda params, batch: loss_sum(params, batch, cfg, training=False)[1]
