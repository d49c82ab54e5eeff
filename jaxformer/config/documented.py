"""What ``help`` shows of a config: its fields, each with its default and its explanation."""

import ast
import dataclasses
import functools
import inspect
import textwrap
from pathlib import Path
from typing import Any

from jaxformer.config.strict import Derived


def document(record: type) -> None:
    """Gives a dataclass a docstring with an Attributes section, made on first use from the texts below its fields, and a
    signature of names and short defaults: the one that dataclasses make of a large config is unreadable."""
    record.__doc__ = _Documentation(inspect.cleandoc(record.__doc__ or ""))  # type: ignore[assignment]
    parameters = [
        inspect.Parameter(field.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=_short(_default(field)))
        for field in dataclasses.fields(record)  # type: ignore[arg-type]
    ]
    # of the function, which pydoc shows; a signature of the class would be inherited by records with more fields
    record.__init__.__signature__ = inspect.Signature([_SELF, *parameters])  # type: ignore[misc]


_SELF = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)


class _Documentation:
    """The docstring of a class, made on first use: no program needs it."""

    def __init__(self, text: str):
        self._text = text

    def __get__(self, instance: Any, owner: type) -> str:
        return f"{self._text}\n\nAttributes:\n{textwrap.indent(chr(10).join(_fields(owner)), '    ')}\n"


@functools.cache
def _fields(record: type) -> list[str]:
    """Lines about the fields of a dataclass."""
    texts: dict[str, str] = {}
    for base in reversed(record.__mro__[:-1]):
        texts |= _texts(Path(inspect.getfile(base))).get(base.__name__, {})
    lines = []
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        default = _default(field)
        # In the place of a type, so that the help of a program, which shows the defaults of a run, does not repeat it.
        shown = f" ({_short(default)!r} by default)"
        if default is inspect.Parameter.empty or isinstance(default, Derived):
            shown = ""
        text = " ".join(texts.get(field.name, "").split())
        lines += textwrap.wrap(f"{field.name}{shown}: {text}", 100, subsequent_indent="    ")
    return lines


@functools.cache
def _texts(file: Path) -> dict[str, dict[str, str]]:
    """Of each class in a file, the texts below its fields."""
    texts: dict[str, dict[str, str]] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            texts[node.name] = {
                field.target.id: text.value.value
                for field, text in zip(node.body, node.body[1:], strict=False)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
            }
    return texts


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default


class _Name:
    """A default record, shown by its name alone."""

    def __init__(self, record: Any):
        self._record = record

    def __repr__(self) -> str:
        return f"{type(self._record).__name__}()"


def _short(default: Any) -> Any:
    return _Name(default) if dataclasses.is_dataclass(default) and not isinstance(default, type) else default
