"""What several components share: the linear map, its precision, dropout and random keys."""

import math
import zlib
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.nn.named import multiply
from jaxformer.parallel.sharding import current, gathered, platform


def dense(equation: str, x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """``einsum(equation, x, weight) + bias`` in x's dtype; ``bias`` broadcasts against the result.

    The weight is read in the order it is stored in: ``einsum`` would choose an order of operands and of contracted axes for
    which CPUs first transpose the weights, at every step of decoding.
    """
    operands, result = equation.split("->")
    x_dims, weight_dims = operands.split(",")
    contracted = [letter for letter in weight_dims if letter not in result]
    x_axes, weight_axes = ([dims.index(letter) for letter in contracted] for dims in (x_dims, weight_dims))
    kept = [letter for letter in x_dims + weight_dims if letter not in contracted]

    def as_stored(x, weight):
        weight = gathered(weight.astype(x.dtype), weight_dims)
        y = jax.lax.dot_general(x, weight, ((x_axes, weight_axes), ((), ())))
        return y.transpose([kept.index(letter) for letter in result])

    def as_matrices(x, weight):
        rows = [axis for axis in range(x.ndim) if axis not in x_axes]
        outputs = weight.shape[len(weight_axes) :]
        x = x.transpose(rows + x_axes)
        y = x.reshape(math.prod(x.shape[: len(rows)]), -1) @ weight.astype(x.dtype).reshape(-1, math.prod(outputs))
        return y.reshape(*x.shape[: len(rows)], *outputs).transpose([kept.index(letter) for letter in result])

    is_flat = by_matrices() and weight_axes == list(range(len(weight_axes)))
    y = multiply(equation, x, weight, by=as_matrices if is_flat else as_stored)
    return y if bias is None else y + bias.astype(x.dtype)


def by_matrices() -> bool:
    """Whether products are better made of matrices, with all rows on one axis: where they are on several, XLA for CPUs copies
    both operands of the weight's gradient first. Not on a mesh, which may spread each of the axes."""
    return platform() == "cpu" and current() is None


def child(rng: jax.Array | None, name: str) -> jax.Array | None:
    """The random key of the part called ``name``; None of None."""
    return None if rng is None else jax.random.fold_in(rng, zlib.crc32(name.encode()))


def dropout(x: jax.Array, rate: float, rng: jax.Array | None) -> jax.Array:
    """Inverted dropout (Srivastava et al. 2014): zero with probability ``rate``, else x / (1 − rate). Without a key, x."""
    if rng is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(rng, jnp.float32(1.0 - rate), x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


def precision(cfg: ModelConfig) -> AbstractContextManager:
    """A float32 model computes float32 products: TPUs and GPUs would otherwise use bfloat16 or TF32 passes unasked."""
    return jax.default_matmul_precision("highest" if cfg.execution.dtype == "float32" else "default")
