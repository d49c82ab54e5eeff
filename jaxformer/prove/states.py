"""Training states compared leaf by leaf, to the bit."""

import dataclasses
import hashlib

import jax
import numpy as np

from jaxformer.parallel import multihost
from jaxformer.training.update import TrainState


def leaves(state: TrainState) -> dict[str, np.ndarray]:
    """All that a state holds, by path: parameters, optimizer state, key and step, as every process has them."""
    plain = dataclasses.replace(state, rng=jax.random.key_data(state.rng))
    found = jax.tree_util.tree_flatten_with_path(plain)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): multihost.to_numpy(leaf) for path, leaf in found}


def digest(array: np.ndarray) -> str:
    """A hash of dtype, shape and bits."""
    return hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()


def differing(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> list[str]:
    """Paths of the leaves that are not equal to the bit, in order; a NaN equals itself."""
    return [name for name in one if name not in other or digest(one[name]) != digest(other[name])]


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """The largest absolute difference of two arrays of one shape; infinite where the shapes differ."""
    if one.shape != other.shape:
        return float("inf")
    return float(np.max(np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64)), initial=0.0))


def size(arrays: dict[str, np.ndarray]) -> str:
    """How much there is: "23 leaves, 1,234 bytes"."""
    return f"{len(arrays)} leaves, {sum(array.nbytes for array in arrays.values()):,} bytes"
