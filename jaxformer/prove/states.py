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
    pairs = jax.tree_util.tree_flatten_with_path(plain)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): multihost.to_numpy(leaf) for path, leaf in pairs}


def digest(array: np.ndarray) -> str:
    """A hash of dtype, shape and bits."""
    return hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()


def differing(expected: dict[str, np.ndarray], actual: dict[str, np.ndarray]) -> list[str]:
    """Paths of the leaves that are not equal bit for bit, in order; a NaN equals itself."""
    return [name for name in expected if name not in actual or digest(expected[name]) != digest(actual[name])]


def apart(expected: np.ndarray, actual: np.ndarray) -> float:
    """The largest absolute difference of two arrays of one shape; infinite where the shapes differ."""
    if expected.shape != actual.shape:
        return float("inf")
    return float(np.max(np.abs(np.asarray(expected, np.float64) - np.asarray(actual, np.float64)), initial=0.0))


def size(arrays: dict[str, np.ndarray]) -> str:
    """How much there is: "23 leaves, 1,234 bytes"."""
    return f"{len(arrays)} leaves, {sum(array.nbytes for array in arrays.values()):,} bytes"
