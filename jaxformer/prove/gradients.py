"""The loss of a batch, and the gradient of every tensor of parameters: whether it is finite, and whether there is one."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.config import spec as specs
from jaxformer.nn import model
from jaxformer.prove.findings import FAILED, OK, WARNING, Finding
from jaxformer.training.balance import nonzero
from jaxformer.training.config import NEXT_TOKEN, Config
from jaxformer.training.objective import Objective, call, mean_metrics

NAMED = 6
"""Tensors that a finding names."""


def measure(objective: Objective, cfg: ModelConfig) -> Callable[[Any, Any], tuple[jax.Array, dict[str, jax.Array]]]:
    """A function of parameters and a batch: the mean loss, and the largest absolute gradient of every tensor, by path; of
    stacked layers, of every layer."""
    dims = {path: param.dims for path, param in specs.walk(model.spec(cfg))}

    def largest(path: str, x: jax.Array) -> jax.Array:
        axes = tuple(range(1 if dims[path].startswith("L") else 0, x.ndim))
        return jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axes)

    def measured(params, batch):
        def mean(params):
            total, sums = call(objective, params, batch, jax.random.key(0))
            return total / nonzero(sums["weight"]), sums

        grads, sums = jax.grad(mean, has_aux=True)(params)
        return mean_metrics(objective, sums)["loss"], {path: largest(path, x) for path, x in specs.walk(grads)}

    return measured


def _entries(largest: dict[str, np.ndarray]) -> Iterator[tuple[str, float]]:
    """``name, value`` of every tensor, the layers of a stack one by one."""
    for path, values in largest.items():
        if np.ndim(values) == 0:
            yield path, float(values)
        else:
            yield from ((f"{path}, layer {layer}", float(value)) for layer, value in enumerate(values))


def complete(largest: dict[str, np.ndarray]) -> bool:
    """Whether no gradient is exactly 0."""
    return all(value != 0 for _, value in _entries(largest))


def finding(config: Config, first: dict[str, np.ndarray], later: dict[str, np.ndarray]) -> Finding:
    """first, later: the gradients before and after a few updates. What starts behind a weight of 0 has none at first."""
    infinite = [name for name, value in _entries(first) if not np.isfinite(value)]
    if infinite:
        return Finding(FAILED, "gradients", f"not finite: {_listed(infinite)}")
    moved = dict(_entries(later))
    # Experts' selection biases [E] are moved by balance_rate, never by a gradient.
    biases = [path for path, param in specs.walk(model.spec(config.model)) if param.dims.removeprefix("L") == "E"]
    trained = [(name, value) for name, value in _entries(first) if name.partition(",")[0] not in biases]
    absent = [name for name, value in trained if value == 0 and moved[name] == 0]
    if absent:
        is_own = config.train.objective != NEXT_TOKEN
        why = "right only if it is not meant to be trained" if is_own else "it would never be trained"
        return Finding(WARNING if is_own else FAILED, "gradients", f"there is none for {_listed(absent)}: {why}")
    waited = sum(value == 0 for _, value in trained)
    after = f"; {waited} of them only after the first updates" if waited else ""
    return Finding(OK, "gradients", f"finite, and not zero, for all {len(trained)} tensors (each layer's by itself){after}")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
