"""JSON of files that may have been made to do harm: bounded in size, depth and number of values, and with one meaning only."""

import json
import math
from pathlib import Path
from typing import Any

from jaxformer.config.textfile import require_regular

LARGEST = 64 << 20
"""Bytes of a file. A tokenizer.json of 262,144 tokens has some 33 MB."""
MOST_VALUES = 2_500_000
"""Values and containers of a file, by its commas and opening brackets: at most 300 MB of memory and 2.5 s. A tokenizer.json
of 262,144 tokens has 1.9 million."""
DEEPEST = 64
"""Containers within each other. Functions that call themselves for each of them stay far from Python's limit."""
LONGEST_NUMBER = 40
"""Characters of an integer: model_max_length is often 10^30; one of hundreds of digits cannot become a float."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises FileNotFoundError, or ValueError that names the file, see ``parse``."""
    try:
        values = parse(content(path))
    except (ValueError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a JSON {type(values).__name__}, not an object")
    return values


def content(path: Path) -> bytes:
    """All bytes of a file. Errors of ``check``."""
    check(path)
    return path.read_bytes()


def check(path: Path) -> None:
    """Raises FileNotFoundError where there is no such file, and ValueError for one of more than ``LARGEST`` bytes and for what
    is no regular file (a FIFO would be waited for, a device has no end)."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    require_regular(path)
    if not path.is_file():
        raise ValueError("it is not a regular file")
    if (size := path.stat().st_size) > LARGEST:
        raise ValueError(f"it has {size:,} bytes, more than the {LARGEST:,} that are allowed")


def parse(data: bytes) -> Any:
    """The value of a JSON text in UTF-8, with a byte order mark or without.

    Raises ValueError for what is no JSON; for keys that occur twice, NaN, infinity and numbers too large for a float, which
    readers take differently; and for more values or more depth than ``MOST_VALUES`` and ``DEEPEST`` allow.
    """
    if (values := data.count(b",") + data.count(b"[") + data.count(b"{")) > MOST_VALUES:
        raise ValueError(f"it has about {values:,} values, more than the {MOST_VALUES:,} that are allowed")
    try:
        value = json.loads(
            data.decode("utf-8-sig"),
            object_pairs_hook=_unique,
            parse_constant=_no_number,
            parse_float=_finite,
            parse_int=_integer,
        )
    except RecursionError:
        raise ValueError(f"it is nested more than {DEEPEST} deep") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not JSON ({error})") from None
    _check_depth(value)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r:.100} occurs twice")
    return values


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not allowed as a number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        _no_number(f"{text:.100}")
    return value


def _integer(text: str) -> int:
    if len(text) > LONGEST_NUMBER:
        raise ValueError(f"an integer of {len(text):,} digits is not allowed")
    return int(text)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST + 1):
        containers = [outer for outer in level if type(outer) in (dict, list)]
        level = [inner for outer in containers for inner in (outer.values() if type(outer) is dict else outer)]
    if level:
        raise ValueError(f"it is nested more than {DEEPEST} deep")
