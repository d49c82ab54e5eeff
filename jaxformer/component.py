"""Components by name, by import path, or as objects.

A component is anything with ``spec(cfg)`` and ``apply(params, x, ...)``: a module, a class, an instance. A config holds it
as a string, so that a config stays hashable and can be written to a file:

* ``"swiglu"``: one of the built-in choices, the table ``CHOICES`` of ``jaxformer.nn.<kind>``;
* ``"package.module:name"`` (or ``"package.module:"``, for a module that is itself the component): anything importable.

An object that no import path leads to (made inside a function, say) works too; only saving it is refused.
"""

import difflib
import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple


class Component(NamedTuple):
    """The two functions every component has; ``site`` says where a position component acts (``nn.position``); ``key_value``
    makes an attention component one that can cross, ``cache`` one that can decode (``nn.attention``)."""

    spec: Callable[..., Any]
    apply: Callable[..., Any]
    site: str = "input"
    key_value: Callable[..., Any] | None = None
    cache: Callable[..., Any] | None = None


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the known name most like ``name``, else a list of the known names."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def resolve(kind: str, value: Any) -> Any:
    """The component that ``value`` names. Raises ValueError for an unknown name or an object without spec and apply."""
    found = _find(kind, value) if isinstance(value, str) else value
    if found is importlib.import_module(f"jaxformer.nn.{kind}"):
        raise ValueError(f"{kind}={value!r} is what looks components up; give it one of: {', '.join(sorted(found.CHOICES))}")
    if not (hasattr(found, "spec") and hasattr(found, "apply")):
        raise ValueError(f"{kind}={value!r}: a component needs both spec(cfg) and apply(params, x, ...)")
    return found


@functools.cache
def _find(kind: str, name: str) -> Any:
    choices = importlib.import_module(f"jaxformer.nn.{kind}").CHOICES
    if name in choices:
        return choices[name]
    if ":" not in name and "." not in name:
        raise ValueError(f"unknown {kind} {name!r}{nearest(name, choices)} (or give 'package.module:name')")
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
    except (ImportError, ValueError, TypeError) as error:  # the last two for "" and for relative names
        raise ValueError(f"{kind}={name!r}: cannot import {module!r}: {error}") from error
    for part in filter(None, attribute.split(".")):
        if not hasattr(found, part):
            raise ValueError(f"{kind}={name!r}: {module!r} has no {attribute!r}{nearest(part, vars(found))}")
        found = getattr(found, part)
    return found


def name_of(kind: str, component: Any) -> Any:
    """The name or import path that leads to ``component``, or ``component`` itself where none does (strings pass through)."""
    if isinstance(component, str):
        return component
    for name, choice in importlib.import_module(f"jaxformer.nn.{kind}").CHOICES.items():
        if choice is component:
            return name
    if isinstance(component, ModuleType):
        return component.__name__ + ":"
    owners = (getattr(owner, "__module__", None) for owner in (component, getattr(component, "spec", None)))
    likely = [sys.modules[name] for name in owners if name in sys.modules]
    for module in (*likely, *list(sys.modules.values())):
        if isinstance(module, ModuleType) and module.__name__ != "__main__":  # a script cannot be imported from elsewhere
            for name, value in list(vars(module).items()):
                if value is component:
                    return f"{module.__name__}:{name}"
    return component
