"""What receives named activations: listeners, which may change them, and captures, which keep them.

JAX keeps compiled programs, and runs them without calling the Python functions that they were made of. The listeners are
therefore a part of the context that JAX compiles for: inside ``listen`` every jitted function is traced anew, and no program
that was compiled there is used outside.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from fnmatch import fnmatch
from typing import Any
from weakref import WeakValueDictionary

import jax
from jax.extend.core import get_opaque_trace_state

from jaxformer.config.components import nearest

Edit = Callable[[jax.Array], jax.Array]
Callback = Callable[[str, jax.Array], jax.Array]


class _Listener:
    """A callback, the patterns that must match what it hears, and the names that it has heard."""

    def __init__(self, callback: Callback, patterns: tuple[str, ...] = ()):
        self.callback, self.patterns, self.matched = callback, patterns, False
        self.heard, self.names = set[str](), set[str]()  # in this block; in the last one that heard anything

    def hear(self, name: str, x: jax.Array) -> jax.Array:
        self.heard.add(name)
        y = self.callback(name, x)
        if getattr(y, "shape", None) != x.shape or y.dtype != x.dtype:
            got = f"{y.dtype}{list(y.shape)}" if hasattr(y, "dtype") else type(y).__name__
            raise ValueError(f"a listener turned activation {name!r} into {got}, but it must stay {x.dtype}{list(x.shape)}")
        return y

    def check(self) -> None:
        """Raises ValueError if nothing was heard in the block that ends, or nothing that a pattern matches. A listener that
        an earlier block shared may hear nothing: its programs have been compiled there, with all that its patterns matched."""
        heard, self.heard = self.heard, set[str]()
        if not heard and self.matched:
            return
        self.names = heard or self.names
        if not self.names:
            raise ValueError(
                "the listener was never called: no model was traced inside the block. A program compiled ahead of time "
                "(jax.jit(f).lower(...).compile()) and jax.make_jaxpr's result cannot change any more: call the function that "
                "they were made of. What jf.stream yields is computed where it is read: read it inside the block"
            )
        for pattern in self.patterns:
            if not any(fnmatch(name, pattern) for name in self.names):
                raise ValueError(f"no activation matches {pattern!r}{nearest(pattern, self.names)}")
        self.matched = True


_listeners = jax.make_user_context(())
"""The listeners of this thread, the outermost first."""
_captures: ContextVar[tuple[Callable[[str, jax.Array], None], ...]] = ContextVar("captures", default=())
_shared: WeakValueDictionary[tuple[tuple[str, Edit], ...], _Listener] = WeakValueDictionary()
"""One listener for equal edits, so that their compiled programs are used again. JAX holds it as long as such a program."""


def listen(listener: Callback | Mapping[str, Edit]) -> contextlib.AbstractContextManager[Any]:
    """Changes activations, or only reads them, while a model is traced inside the ``with`` block.

    listener: ``{pattern: edit}``, where ``edit(x) -> x`` is applied to every activation whose name matches the shell-style
    pattern, in the order of the dict; or a callback ``(name, x) -> x`` for every activation. Both give an array of the same
    shape and dtype. An inner block's listener hears what the outer one has made of an activation.

    Jitted functions, and ``jf.generate``, ``jf.stream`` and ``jf.beam_search``, are compiled for the listener, whether they
    were compiled before or not. Equal dicts (of the same functions) use the same programs in every block; like all functions
    that JAX traces, edits must be pure. A callback is called anew in every block, and programs are compiled anew for it.

    Raises ValueError, at the end of the block, for a pattern that matched nothing and for a listener that heard nothing.

    >>> with jf.listen({"decoder.3.mlp.out": jnp.zeros_like}):
    ...     ablated = jax.jit(jf.forward)(params, tokens, cfg)
    """
    if isinstance(listener, Mapping):
        return _during(_shared_listener(listener), listener)
    if not callable(listener):
        raise ValueError(f"a listener must be a dict {{pattern: edit}} or a function (name, x) -> x, not {listener!r:.80}")
    return _during(_Listener(listener), listener)


def _shared_listener(edits: Mapping[str, Edit]) -> _Listener:
    if not edits:
        raise ValueError("a listener's dict {pattern: edit} is empty")
    for pattern, edit in edits.items():
        if not isinstance(pattern, str) or not callable(edit):
            raise ValueError(f"a listener's dict has functions x -> x by pattern, not {pattern!r}: {edit!r:.80}")
    items = tuple(edits.items())
    try:
        listener = _shared.get(items)
    except TypeError as error:
        raise ValueError(f"edits must be hashable, as functions are: {error}") from error
    if listener is None:
        listener = _shared[items] = _Listener(functools.partial(_edited, items), tuple(edits))
    return listener


def _edited(items: tuple[tuple[str, Edit], ...], name: str, x: jax.Array) -> jax.Array:
    for pattern, edit in items:
        x = edit(x) if fnmatch(name, pattern) else x
    return x


@contextlib.contextmanager
def _during(listener: _Listener, value: Any) -> Iterator[Any]:
    with _listeners((*_listeners.value, listener)):
        yield value
    listener.check()


def anyone() -> bool:
    """Whether a listener or a capture receives activations."""
    return bool(_listeners.value or _captures.get())


def tell(name: str, x: jax.Array) -> jax.Array:
    """What the listeners make of the activation ``x``; captures receive that."""
    for listener in _listeners.value:
        x = listener.hear(name, x)
    for keep in _captures.get():
        keep(name, x)
    return x


def capture(f: Callable[..., Any], *patterns: str) -> Callable[..., tuple[Any, dict[str, jax.Array]]]:
    """``f`` that also returns the activations whose names match one of the shell-style ``patterns`` (all without any), as
    listeners have made them. The result may be jitted, ``f`` itself not: what is traced inside it cannot leave it.

    Raises ValueError for a pattern that matches nothing, and for an activation of a jitted function or a loop inside ``f``.

    >>> logits, seen = jax.jit(capture(lambda p, t: jf.forward(p, t, cfg), "*attention.weights"))(params, tokens)
    """
    patterns = patterns or ("*",)

    def run(*args, **kwargs):
        seen: dict[str, jax.Array] = {}
        names: set[str] = set()
        trace = get_opaque_trace_state()

        def keep(name, x):
            names.add(name)
            if not any(fnmatch(name, pattern) for pattern in patterns):
                return
            if get_opaque_trace_state() != trace:
                raise ValueError(
                    f"activation {name!r} is computed inside a jitted function, a loop or a gradient of f, which it cannot "
                    "leave: capture the plain function, and jit what capture gives"
                )
            seen[name] = x

        token = _captures.set((*_captures.get(), keep))
        try:
            out = f(*args, **kwargs)
        finally:
            _captures.reset(token)
        if not names:
            raise ValueError("no activation was traced: f must call the model, and must not be jitted (jit what capture gives)")
        for pattern in patterns:
            if not any(fnmatch(name, pattern) for name in names):
                raise ValueError(f"no activation matches {pattern!r}{nearest(pattern, names)}")
        return out, seen

    return run
