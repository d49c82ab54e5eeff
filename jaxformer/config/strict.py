"""Config records: frozen dataclasses that refuse what does not fit a field, and how they are written and read."""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config.components import foreign, from_plain, nearest, to_plain

DTYPES = ("float16", "bfloat16", "float32", "float64")
"""The dtypes that a model can be stored and computed in, and that a cache can hold."""
SEEDS = 2**32
"""Every seed is below: a random key of JAX is made of 32 bits of it, and would be the same for larger ones."""


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
    the nearest right thing. Numbers must be finite, and must not become 0 or infinite in float32, in which they are used.
    ``UNCHECKED`` names fields that hold components, which
    ``components.normalized`` checks."""

    UNCHECKED: ClassVar[tuple[str, ...]] = ()
    FORMER: ClassVar[dict[str, str]] = {}
    """What fields of earlier versions are called now."""
    NAMES: ClassVar[Mapping[str, Collection[str]]] = {}
    """Of each field that may hold an import path, the library's own names."""

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
            must = _described(field.type)
            if isinstance(value, int | float) and 0 < abs(value) < math.inf and not _in_float32(value):
                must = f"between {LEAST:.3g} and {MOST:.3g} in absolute value, the range of float32 numbers"
            raise ValueError(f"{field.name}={repr(value)[:200]} must be {must}")


def fits(value: Any, kind: Any) -> bool:
    """Whether ``value`` is of the annotated type ``kind``: bools are no ints, ints are floats, floats are those of float32, and
    ints have 64 bits."""
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
        return isinstance(value, int | float) and not isinstance(value, bool) and _in_float32(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    return kind is Any or isinstance(value, kind)


LEAST, MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def _in_float32(value: float) -> bool:
    """Whether float32 holds the number, to its precision. What is below its normal numbers counts as lost: devices make 0 of
    it."""
    return value == 0 or LEAST <= abs(value) <= MOST


def within(record: Any, low: float, high: float, *names: str, open_low: bool = False, prefix: str = "") -> None:
    """Raises ValueError for a field outside [low, high) — or (low, high) with ``open_low``. None is let through. A float counts
    as the float32 that it becomes: 1 − 1e-9 is 1."""
    for name in names:
        value = getattr(record, name)
        number = float(np.float32(value)) if isinstance(value, float) else value
        if number is not None and not ((low < number if open_low else low <= number) and number < high):
            least = f"above {low}" if open_low else f"at least {low}"
            most = "" if high == math.inf else f" and below {high}"
            rounded = "" if number == value else f" (it is {number:g} in float32)"
            raise ValueError(f"{prefix}{name}={value} must be {least}{most}{rounded}")


def check_seed(name: str, seed: Any) -> None:
    """Raises ValueError for anything but an integer from 0 to 2^32 − 1."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < SEEDS:
        raise ValueError(f"{name}={seed!r} must be an integer from 0 to {SEEDS - 1}")


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
    names = {
        int: "an integer of at most 64 bits",
        float: "a finite number",
        bool: "True or False",
        str: "a string",
        type(None): "None",
    }
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


def from_dict(cls: Any, values: dict[str, Any], trust: bool = False) -> Any:
    """The config that ``to_dict`` made ``values`` from. trust: whether import paths in it may be followed, which runs code.

    Raises ValueError for what does not fit, and, before anything is imported, for import paths that are not trusted.
    """
    if not trust:
        refuse(import_paths(cls, values))
    records = _records(cls)
    built = {}
    for name, value in values.items():
        if name in cls.UNCHECKED:
            value = from_plain(name, value)
        elif name in records and isinstance(value, dict):
            value = from_dict(records[name], value, trust)
        built[name] = tuple(value) if isinstance(value, list) else value
    return cls(**built)


def import_paths(cls: Any, values: dict[str, Any], prefix: str = "") -> dict[str, list[str]]:
    """``dotted field -> import paths`` in the plain ``values`` of a record, beside the library's own names. Nothing is
    imported."""
    by_field = {prefix + name: foreign(values[name], known) for name, known in cls.NAMES.items() if name in values}
    for name, record in _records(cls).items():
        if isinstance(values.get(name), dict):
            by_field |= import_paths(record, values[name], f"{prefix}{name}.")
    return {name: paths for name, paths in by_field.items() if paths}


def refuse(paths: Mapping[str, list[str]]) -> None:
    """Raises ValueError for ``import_paths`` that are not trusted, if there are any."""
    if paths:
        named = ", ".join(f"{field}={path!r}" for field, several in paths.items() for path in dict.fromkeys(several))
        raise ValueError(
            f"the config names code that is not part of jaxformer: {named}. Loading it would run that code; if you trust it, "
            "pass trust=True, or --trust on the command line"
        )


def _records(cls: type) -> dict[str, Any]:
    """The fields of ``cls`` that are records themselves, with their types."""
    kinds = {field.name: field.type for field in dataclasses.fields(cls)}
    plain = {name: typing.get_args(k)[0] if typing.get_origin(k) is typing.Annotated else k for name, k in kinds.items()}
    return {name: kind for name, kind in plain.items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}


def dtype_name(name: str, value: Any) -> str:
    """The name of one of ``DTYPES``. Raises ValueError, naming the field ``name``, for anything else."""
    try:
        dtype = jnp.dtype(value if value is not None else "None")  # jnp.dtype(None) is a default, which nobody asked for
    except TypeError as error:
        raise ValueError(f"{name}={value!r} is not a dtype; try 'float32' or 'bfloat16'") from error
    if dtype.name not in DTYPES:
        raise ValueError(f"{name}={value!r} must be a floating dtype: {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"{name}={value!r} needs jax.config.update('jax_enable_x64', True); without it, JAX would use float32")
    return dtype.name
