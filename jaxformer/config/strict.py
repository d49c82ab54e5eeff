"""Config records: frozen dataclasses that refuse what does not fit a field, and how they are written and read."""

import dataclasses
import json
import math
import sys
import types
import typing
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from jaxformer.config.components import from_plain, nearest, to_plain


class Derived(int):
    """An integer worked out from other fields (0: not yet); ``dataclasses.replace`` works it out again, not keeping it.

    rule: a function of the config that gives it, where that is another than the field's own.
    """

    rule: Callable[[Any], int] | None

    def __new__(cls, value: int = 0, rule: Callable[[Any], int] | None = None):
        self = super().__new__(cls, value)
        self.rule = rule
        return self


class Strict:
    """Base of every config: an unknown field, or a value that is not of its field's type, is a ValueError that names it and
    the nearest right thing. Numbers must be finite. ``UNCHECKED`` names fields that hold components, which
    ``components.normalized`` checks."""

    UNCHECKED: ClassVar[tuple[str, ...]] = ()
    FORMER: ClassVar[dict[str, str]] = {}
    """What fields of earlier versions are called now."""

    @classmethod
    def keywords(cls) -> list[str]:
        """Names that the constructor takes."""
        return [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]

    def __new__(cls, *args, **kwargs):
        known = cls.keywords()
        for name in kwargs:
            if name not in known:
                hint = f"; it is called {cls.FORMER[name]} now" if name in cls.FORMER else nearest(name, known)
                raise ValueError(f"{cls.__name__} has no field {name!r}{hint}")
        return super().__new__(cls)

    def __post_init__(self):
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.name in self.UNCHECKED or fits(value, field.type):
                continue
            if names := _names(field.type):
                items = value if isinstance(value, tuple) else (value,)
                wrong = next((item for item in items if item not in names), value)
                raise ValueError(f"unknown {field.name} {wrong!r}{nearest(wrong, names)}")
            raise ValueError(f"{field.name}={value!r} must be {_described(field.type)}")


def fits(value: Any, kind: Any) -> bool:
    """Whether ``value`` is of the annotated type ``kind``: bools are no ints, ints are floats, floats are finite."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return fits(value, inner[0])
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in inner)
    if origin is Literal:
        return value in inner
    if origin is tuple and inner[-1] is not Ellipsis:
        return isinstance(value, tuple) and len(value) == len(inner) and all(map(fits, value, inner))
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(item, inner[0]) for item in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return kind is Any or isinstance(value, kind)


def within(record: Any, low: float, high: float, *names: str, open_low: bool = False, prefix: str = "") -> None:
    """Raises ValueError for a field outside [low, high) — or (low, high) with ``open_low``. None is let through."""
    for name in names:
        value = getattr(record, name)
        if value is not None and not ((low < value if open_low else low <= value) and value < high):
            least = f"above {low}" if open_low else f"at least {low}"
            most = "" if high == math.inf else f" and below {high}"
            raise ValueError(f"{prefix}{name}={value} must be {least}{most}")


def _names(kind: Any) -> tuple[str, ...]:
    """The names that a field takes, alone or by layer; none for a field that takes other values."""
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return ()
    return next(filter(None, map(_names, typing.get_args(kind))), ())


def _described(kind: Any) -> str:
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Annotated:
        return _described(inner[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(_described(option) for option in inner)
    if typing.get_origin(kind) is tuple and inner[-1] is not Ellipsis:
        return f"({', '.join(_described(option) for option in inner)})"
    if typing.get_origin(kind) is tuple:
        return f"a tuple of ({_described(inner[0])})"
    names = {int: "an integer", float: "a finite number", bool: "True or False", str: "a string", type(None): "None"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def to_json(config: Any) -> str:
    """A (nested) config as JSON. Raises ValueError for a component that no import path leads to."""
    return json.dumps(to_dict(config), indent=2)


def to_dict(record: Any) -> dict[str, Any]:
    """A (nested) config as nested dicts of what JSON can hold. Raises ValueError as ``to_json``."""
    plain = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name in record.UNCHECKED:
            value = to_plain(field.name, value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = to_dict(value)
        elif isinstance(value, Derived):
            value = None if value.rule is None else int(value)  # None: to be worked out again, of an encoder too
        plain[field.name] = value
    return plain


def from_dict(cls: type, values: dict[str, Any]) -> Any:
    """The config that ``to_dict`` made ``values`` from. Raises ValueError for what does not fit."""
    kinds = {f.name: f.type for f in dataclasses.fields(cls)}
    unchecked = getattr(cls, "UNCHECKED", ())
    built = {}
    for name, value in values.items():
        kind = kinds.get(name)
        if typing.get_origin(kind) is typing.Annotated:
            kind = typing.get_args(kind)[0]
        if name in unchecked:
            value = from_plain(name, value)
        elif isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
            value = from_dict(kind, value)
        built[name] = tuple(value) if isinstance(value, list) else value
    return cls(**built)


def dtype_name(name: str, value: Any) -> str:
    """The name of a floating dtype. Raises ValueError, naming the field ``name``, for anything else."""
    try:
        dtype = jnp.dtype(value if value is not None else "None")  # jnp.dtype(None) is a default, which nobody asked for
    except TypeError as error:
        raise ValueError(f"{name}={value!r} is not a dtype; try 'float32' or 'bfloat16'") from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{name}={value!r} must be a floating dtype, such as 'float32' or 'bfloat16'")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"{name}={value!r} needs jax.config.update('jax_enable_x64', True): JAX would make float32 of it")
    return dtype.name
