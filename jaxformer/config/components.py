"""Components by name, by import path, or as objects with hyperparameters of their own.

A component is anything with ``spec(cfg)`` and ``apply(params, x, ...)``: a module, a class, an instance. A config holds

* the name of a built-in one, such as ``"swiglu"``;
* an import path, ``"package.module:name"`` (``"package.module:"`` for a module that is itself the component), with
  hyperparameters in parentheses where it is a dataclass: ``"package.module:Name(temperature=2.0)"``;
* an instance of a frozen dataclass, whose fields are its hyperparameters. It is hashable, and is written to a file as its
  import path and its fields.

An object that no import path leads to (made inside a function, say) works too; only saving it is refused.
"""

import ast
import dataclasses
import difflib
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

BUILT_IN: dict[str, tuple[str, ...]] = {
    "attention": ("grouped", "latent"),
    "mlp": ("relu", "silu", "gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh"),
    "norm": ("layer", "rms", "rms_plus"),
    "position": ("none", "sinusoidal", "sinusoidal_half", "learned", "rope", "relative"),
}
"""Names of the built-in components of each kind, which the dicts ``CHOICES`` of ``jaxformer.nn`` define."""


class Component(NamedTuple):
    """The two functions that every component has. ``site`` says where a position component acts (``nn.position``);
    ``key_value`` makes an attention component one that can cross, ``cache`` one that can decode (``nn.attention``)."""

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


def resolve(kind: str, value: Any, choices: Mapping[str, Any]) -> Any:
    """The component that a config's ``value`` stands for, of the built-in ``choices`` or of a user's own module."""
    if not isinstance(value, str):
        return value
    return choices[value] if value in choices else imported(kind, value)


def normalized(kind: str, value: Any) -> Any:
    """``value`` as a config keeps it: a built-in name, an import path, an instance of a dataclass, or an object.

    Raises ValueError for an unknown name, an import path that leads nowhere, and an object without spec and apply.
    """
    if isinstance(value, str) and value in BUILT_IN[kind]:
        return value
    component = imported(kind, value) if isinstance(value, str) else value
    if getattr(component, "__name__", None) == f"jaxformer.nn.{kind}":
        raise ValueError(
            f"{kind}={value!r} is not a component but what looks them up; give one of: {', '.join(BUILT_IN[kind])}"
        )
    if isinstance(component, type) and dataclasses.is_dataclass(component):
        component = _instance(kind, value, component, {})
    if isinstance(component, type) and isinstance(inspect.getattr_static(component, "spec", None), types.FunctionType):
        raise ValueError(f"{kind}={value!r} is a class, and its methods need an instance; give {component.__name__}()")
    if not (hasattr(component, "spec") and hasattr(component, "apply")):
        raise ValueError(f"{kind}={value!r}: a component needs both spec(cfg) and apply(params, x, ...)")
    if has_fields(component):
        if hasattr(component, "component"):
            raise ValueError(
                f"{kind}={component!r}: a hyperparameter cannot be called 'component', a name kept for the import path"
            )
        _check_hashable(kind, component)
        return component
    return value if isinstance(value, str) else path_of(component)


def has_fields(component: Any) -> bool:
    """Whether ``component`` is an instance of a dataclass: its fields are hyperparameters."""
    return dataclasses.is_dataclass(component) and not isinstance(component, type)


def _instance(kind: str, value: Any, component: type, fields: dict[str, Any]) -> Any:
    try:
        return component(**fields)
    except TypeError as error:
        raise ValueError(f"{kind}={value!r} has hyperparameters without a default: {error}") from error


def _check_hashable(kind: str, component: Any) -> None:
    try:
        hash(component)
    except TypeError as error:
        raise ValueError(
            f"{kind}={component!r} is not hashable; declare it @dataclass(frozen=True), and use tuples in place of lists"
        ) from error


def foreign(value: Any, known: Collection[str]) -> list[str]:
    """The import paths in a ``value`` from JSON that stands for a component, or for a name beside the ``known`` ones: all texts
    for which ``imported`` might import something. Nothing is imported."""
    if isinstance(value, list | tuple):
        return [path for item in value for path in foreign(item, known)]
    name = value.get("component") if isinstance(value, dict) else value
    return [name] if isinstance(name, str) and name not in known and (":" in name or "." in name) else []


@functools.cache
def imported(kind: str, name: str) -> Any:
    """What the import path ``name`` leads to, called with the hyperparameters in its parentheses if it has any."""
    path, parenthesis, _ = name.partition("(")
    module, colon, attribute = path.partition(":")
    if not colon and "." not in path:
        raise ValueError(f"unknown {kind} {name!r}{nearest(path, BUILT_IN.get(kind, ()))} (or give 'package.module:name')")
    try:
        value = importlib.import_module(module)
    except (ImportError, ValueError, TypeError) as error:  # the last two for "" and for relative names
        dotted = "" if colon else " (a name in a module follows a colon: package.module:name)"
        raise ValueError(
            f"{kind}={name!r}: cannot import {module!r}: {error}. Its folder must be on PYTHONPATH{dotted}"
        ) from error
    for step in filter(None, attribute.split(".")):
        if not hasattr(value, step):
            raise ValueError(
                f"{kind}={name!r}: {module!r} has no {attribute!r}{nearest(step, [n for n in vars(value) if n[0] != '_'])}"
            )
        value = getattr(value, step)
    return _called(kind, name, value) if parenthesis else value


def _called(kind: str, name: str, component: Any) -> Any:
    """``component`` with the keyword literals that stand in the parentheses of ``name``."""
    try:
        call = ast.parse(name.partition(":")[2], mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name | ast.Attribute) or call.args:
            raise ValueError("the hyperparameters are not keywords")
        fields = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{kind}={name!r}: write hyperparameters as keywords, such as Name(temperature=2.0)") from error
    return _constructed(kind, name, component, fields)


def _constructed(kind: str, name: str, component: Any, fields: dict[str, Any]) -> Any:
    if not (isinstance(component, type) and dataclasses.is_dataclass(component)):
        raise ValueError(f"{kind}={name!r} is not a dataclass, so it takes no hyperparameters")
    known = [field.name for field in dataclasses.fields(component) if field.init]
    for field in fields:
        if field not in known:
            raise ValueError(f"{kind}={name!r} has no hyperparameter {field!r}{nearest(field, known)}")
    return _instance(kind, name, component, fields)


def required(function: Any) -> int:
    """How many arguments a function must be given by position."""
    parameters = inspect.signature(function).parameters.values()
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters)


def path_of(component: Any) -> Any:
    """The import path that leads to ``component``, or ``component`` itself where none does."""
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


def to_plain(kind: str, value: Any) -> Any:
    """A component as JSON can hold it: a string, or for an instance of a dataclass ``{"component": path, field: value, ...}``.

    Raises ValueError for one that no import path leads to, and for hyperparameters that JSON cannot hold.
    """
    if type(value) is tuple:  # a NamedTuple is one component
        return [to_plain(kind, item) for item in value]
    path = value if isinstance(value, str) else path_of(type(value) if has_fields(value) else value)
    if not isinstance(path, str):
        raise ValueError(
            f"{kind}={value!r} cannot be written to a file: define it at the top level of an importable module "
            "(not of the script that runs), or give it as 'package.module:name'"
        )
    if not has_fields(value):
        return path
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    for name, hyperparameter in fields.items():
        if not _is_plain(hyperparameter):
            raise ValueError(
                f"{kind}={value!r} cannot be written to a file: its {name} must be a number, a string, a boolean, None or a "
                "tuple of these"
            )
    return {"component": path} | fields


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else value is None or type(value) in (bool, int, float, str)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def from_plain(kind: str, value: Any) -> Any:
    """What ``to_plain`` made ``value`` from, imported: the caller has to trust its import paths (``foreign``). Raises
    ValueError where the import path or a field is not there any more."""
    if isinstance(value, list):
        return tuple(from_plain(kind, item) for item in value)
    if not isinstance(value, dict):
        return value
    fields = {name: _tuples(hyperparameter) for name, hyperparameter in value.items() if name != "component"}
    path = value.get("component")
    if not isinstance(path, str):
        raise ValueError(f"{kind}={value!r} does not name a component")
    return _constructed(kind, path, imported(kind, path), fields)
