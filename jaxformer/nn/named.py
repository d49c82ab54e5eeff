"""Named activations and products: the one place where what flows through a model can be checked, captured, edited, counted.

``named(x, "mlp.hidden", "BTF", cfg)`` marks an activation, and puts it where its letters belong on a mesh
(``jaxformer.sharding``). It costs nothing when nobody listens; inside ``listen`` each marked activation is handed to a
callback, under its full name such as ``decoder.3.mlp.hidden``. ``multiply`` is what every product of a model goes through,
so that a ``Watcher`` learns of them too.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from fnmatch import fnmatch
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxformer.config import ModelConfig
from jaxformer.config.components import nearest
from jaxformer.parallel.sharding import constrain

Listener = Callable[[str, jax.Array], jax.Array]


class Watcher(Protocol):
    """What is told of everything that happens inside ``watch``; names are full ones."""

    def activation(self, name: str, dims: str, x: jax.Array) -> None:
        """A named activation, a letter an axis."""

    def product(self, name: str, equation: str, x: jax.Array, y: jax.Array, by: Callable) -> jax.Array:
        """A product that is to be made: must give ``by(x, y)``. The name ends with a dot where the product has none of its own
        (one of its operands is then a parameter, as it is stored)."""


_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
_labels: ContextVar[set[str] | None] = ContextVar("labels", default=None)
_scope: ContextVar[tuple[str, ...]] = ContextVar("scope", default=())


def named(x: jax.Array, name: str, dims: str, cfg: ModelConfig, *, labelled: bool = False) -> jax.Array:
    """``x``, known as ``name`` and with a letter an axis. Raises ValueError where letters and shape do not agree.

    labelled: x has its ``label`` already, which would otherwise be given; twice, it would be kept twice."""
    if len(dims) != x.ndim or any(cfg.sizes.get(letter, n) != n for letter, n in zip(dims, x.shape, strict=True)):
        expected = ", ".join(f"{letter}={cfg.sizes.get(letter, 'any')}" for letter in dims)
        raise ValueError(f"activation {name!r} has shape {x.shape}, not [{expected}]")
    x = constrain(x, dims)
    x = x if labelled else checkpoint_name(x, label(name))
    listener, watcher = _listener.get(), _watcher.get()
    if watcher is not None:
        watcher.activation(_full(name), dims, x)
    return x if listener is None else listener(_full(name), x)


def multiply(
    equation: str, x: jax.Array, y: jax.Array, *, name: str = "", by: Callable[..., jax.Array] | None = None, **options: Any
) -> jax.Array:
    """``einsum(equation, x, y, **options)``, or what ``by(x, y)`` makes of that equation in its own way."""
    by = functools.partial(jnp.einsum, equation, **options) if by is None else by
    watcher = _watcher.get()
    return by(x, y) if watcher is None else watcher.product(_full(name), equation, x, y, by)


def _full(name: str) -> str:
    return ".".join((*_scope.get(), name))


def label(name: str) -> str:
    """What ``name`` is called within a layer, whichever that is, such as "attention.mixed" or "block.out": the names that
    ``ModelConfig.save`` knows."""
    parts = [part for part in _scope.get()[1:] if not part.isdigit()]
    found = ".".join((*(parts or ["block"]), name))
    if (labels := _labels.get()) is not None:
        labels.add(found)
    return found


def labels() -> AbstractContextManager[set[str]]:
    """The labels of what is named inside."""
    return _during(_labels, set())


def listening() -> bool:
    """Whether somebody listens or watches (the layers are then unrolled and nothing is rematerialised: values can leave)."""
    return _listener.get() is not None or _watcher.get() is not None


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Prefixes the names given inside; profiles show it too."""
    token = _scope.set((*_scope.get(), name))
    try:
        with jax.named_scope(name):
            yield
    finally:
        _scope.reset(token)


def listen(listener: Listener) -> AbstractContextManager[Listener]:
    """Calls ``listener(name, x) -> x`` for every named activation traced inside."""
    return _during(_listener, listener)


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


def capture(f: Callable[..., Any], pattern: str = "*") -> Callable[..., tuple[Any, dict[str, jax.Array]]]:
    """``f`` that also returns the activations whose names match the shell-style ``pattern``. The result may be jitted, ``f``
    itself not (what is traced inside it cannot get out). Raises ValueError if nothing matches.

    >>> logits, seen = jax.jit(capture(lambda p, t: jf.forward(p, t, cfg), "*attention.weights"))(params, tokens)
    """

    def run(*args, **kwargs):
        seen: dict[str, jax.Array] = {}
        names: set[str] = set()

        def keep(name, x):
            names.add(name)
            if fnmatch(name, pattern):
                seen[name] = x
            return x

        with listen(keep):
            out = f(*args, **kwargs)
        if not seen:
            raise ValueError(f"no activation matches {pattern!r}{nearest(pattern, names)}")
        return out, seen

    return run
