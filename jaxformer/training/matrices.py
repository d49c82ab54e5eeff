"""Optimizers of matrices: what a tensor's letters say of the matrices in it, and the rules that use them.

A weight ``DKGH`` that contracts D into KGH is one matrix [D, K·G·H]. Stacked layers and experts are matrices by themselves, so
that a model trains alike however its parameters are stacked.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from jaxformer.config import ModelConfig
from jaxformer.config.spec import Param

Tree = Any


def over(function: Any, spec: Tree, *trees: Tree) -> Tree:
    """``function(param, leaf, ...)`` for every ``Param`` of a spec and what other trees have in its place."""
    return jax.tree.map(function, spec, *trees, is_leaf=lambda leaf: isinstance(leaf, Param))


def scaled(factors: Tree) -> optax.GradientTransformation:
    """Multiplies each tensor's update by its own number."""

    def update(updates, state, params=None):
        return jax.tree.map(lambda update, factor: update * factor, updates, factors), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def is_matrix(param: Param) -> bool:
    """Whether Muon is for it: a weight of the model's inside, not its head. Embeddings are no weights: nothing contracts V."""
    return bool(param.inputs and param.outputs) and "V" not in param.dims


def muon(
    spec: Tree, cfg: ModelConfig, others: optax.GradientTransformation, *, beta: float, eps: float, rms: float
) -> optax.GradientTransformation:
    """optax's Muon for every matrix, with ``others`` for the other tensors. beta, eps and rms: see ``OptimConfig``; the
    iteration has 5 steps with Jordan's coefficients, of Nesterov's momentum."""

    def axes(param: Param) -> Any:
        if not is_matrix(param):
            return optax.MaskedNode()
        return MuonDimensionNumbers(*(tuple(map(param.dims.index, letters)) for letters in (param.inputs, param.outputs)))

    def factor(param: Param) -> float:
        if not is_matrix(param):
            return 1.0
        sizes = dict(zip(param.dims, param.shape(cfg), strict=True))
        fan_in, fan_out = (math.prod(map(sizes.__getitem__, letters)) for letters in (param.inputs, param.outputs))
        return rms * max(fan_in, fan_out) ** 0.5 if rms else max(1.0, fan_out / fan_in) ** 0.5

    orthogonal = optax.contrib.scale_by_muon(beta=beta, eps=eps, weight_dimension_numbers=over(axes, spec))
    labels = over(lambda param: "muon" if is_matrix(param) else "adamw", spec)
    return optax.chain(optax.partition({"muon": orthogonal, "adamw": others}, labels), scaled(over(factor, spec)))


def adafactor(spec: Tree) -> optax.GradientTransformation:
    """optax's Adafactor of every matrix: second moments factored where both sides are at least 128, updates clipped to a root
    mean square of 1 and multiplied by the matrix's own."""
    rule = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms())
    return each(rule, spec)


def each(rule: optax.GradientTransformation, spec: Tree) -> optax.GradientTransformation:
    """``rule`` of every matrix by itself; of tensors that are no weights, of every layer's. The state is a tree of the rule's
    states, each with a leading axis over a tensor's matrices."""

    def init(params):
        return over(lambda param, x: jax.vmap(rule.init)(split(param, x)), spec, params)

    def update(updates, state, params):
        def update_matrices(param, update, state, x):
            y, state = jax.vmap(rule.update)(split(param, update), state, split(param, x))
            return joined(param, y, update.shape), state

        both = over(update_matrices, spec, updates, state, params)
        return tuple(over(lambda param, pair, i=i: pair[i], spec, both) for i in (0, 1))

    return optax.GradientTransformation(init, update)


def split(param: Param, x: jax.Array) -> jax.Array:
    """The matrices [batch, inputs, outputs] of a weight; of another tensor its layers, [layers, ...]."""
    order, sizes = _order(param), dict(zip(param.dims, x.shape, strict=True))
    flat = [math.prod(map(sizes.__getitem__, letters)) for letters in order]
    return jnp.transpose(x, [param.dims.index(letter) for letter in "".join(order)]).reshape(flat)


def joined(param: Param, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The tensor of ``shape`` whose ``split`` is ``x``."""
    letters, sizes = "".join(_order(param)), dict(zip(param.dims, shape, strict=True))
    return jnp.transpose(x.reshape([sizes[letter] for letter in letters]), [letters.index(letter) for letter in param.dims])


def _order(param: Param) -> list[str]:
    """The letters that number matrices, and those of each axis of one."""
    if param.inputs and param.outputs:
        return ["".join(d for d in param.dims if d not in param.inputs + param.outputs), param.inputs, param.outputs]
    return ["L" if "L" in param.dims else "", *param.dims.replace("L", "")]
