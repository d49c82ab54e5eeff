"""Named activations and products: the one place where what flows through a model can be checked, captured, edited, counted.

``named(x, "mlp.hidden", "BTF", cfg)`` names an activation, and shards it by its letters on a mesh
(``jaxformer.parallel.sharding``). It costs nothing when nobody listens; inside ``listen`` (``nn.listening``) each named
activation is handed to the listener, under its full name such as ``decoder.3.mlp.hidden``. Every product of a model goes
through ``multiply``, so that a ``Watcher`` sees products too.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxformer.config import ModelConfig
from jaxformer.nn import listening as listeners
from jaxformer.parallel.sharding import constrain


class Watcher(Protocol):
    """A callback that sees everything that is traced inside ``watch``, by full names."""

    def activation(self, name: str, dims: str, x: jax.Array) -> None:
        """A named activation; ``dims`` has one letter per axis."""

    def product(self, name: str, equation: str, x: jax.Array, y: jax.Array, by: Callable) -> jax.Array:
        """A product that is to be computed: must return ``by(x, y)``. The name ends with a dot where the product has no name
        (one of its operands is then a parameter, as it is stored)."""


_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
_labels: ContextVar[set[str] | None] = ContextVar("labels", default=None)
_scope: ContextVar[tuple[str, ...]] = ContextVar("scope", default=())


def named(x: jax.Array, name: str, dims: str, cfg: ModelConfig, *, labelled: bool = False) -> jax.Array:
    """``x`` under a name, with one letter of ``dims`` per axis. Raises ValueError where letters and shape do not agree.

    labelled: whether ``x`` has its ``label`` already; rematerialisation would keep an array twice that is labelled twice."""
    if len(dims) != x.ndim or any(cfg.sizes.get(letter, n) != n for letter, n in zip(dims, x.shape, strict=True)):
        expected = ", ".join(f"{letter}={cfg.sizes.get(letter, 'any')}" for letter in dims)
        raise ValueError(f"activation {name!r} has shape {x.shape}, not [{expected}]")
    x = constrain(x, dims)
    x = x if labelled else checkpoint_name(x, label(name))
    watcher = _watcher.get()
    if watcher is not None:
        watcher.activation(_full(name), dims, x)
    return listeners.tell(_full(name), x)


def multiply(
    equation: str, x: jax.Array, y: jax.Array, *, name: str = "", by: Callable[..., jax.Array] | None = None, **options: Any
) -> jax.Array:
    """``einsum(equation, x, y, **options)``, or ``by(x, y)``, which computes the same product in another way."""
    by = functools.partial(jnp.einsum, equation, **options) if by is None else by
    watcher = _watcher.get()
    return by(x, y) if watcher is None else watcher.product(_full(name), equation, x, y, by)


def _full(name: str) -> str:
    return ".".join((*_scope.get(), name))


def label(name: str) -> str:
    """What ``name`` is called in every layer, such as "attention.mixed" or "block.out": the names that
    ``Execution.remat_save`` takes."""
    scopes = [outer for outer in _scope.get()[1:] if not outer.isdigit()]
    in_layer = ".".join((*(scopes or ["block"]), name))
    if (labels := _labels.get()) is not None:
        labels.add(in_layer)
    return in_layer


def labels() -> AbstractContextManager[set[str]]:
    """The set of labels of everything that is named inside."""
    return _during(_labels, set())


def listening() -> bool:
    """Whether anyone listens or watches: layers are then unrolled and nothing is rematerialised, so that values can leave."""
    return listeners.anyone() or _watcher.get() is not None


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Prefixes the names of everything inside; profiles show it too."""
    token = _scope.set((*_scope.get(), name))
    try:
        with jax.named_scope(name):
            yield
    finally:
        _scope.reset(token)


def watch(watcher: Watcher) -> AbstractContextManager[Watcher]:
    """Tells ``watcher`` of every named activation and every product traced inside."""
    return _during(_watcher, watcher)


@contextlib.contextmanager
def _during(variable: ContextVar, value: Any) -> Iterator[Any]:
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
