"""Files of text and JSON, as every room reads them: regular files, UTF-8, without a byte order mark."""

import os
import stat
from pathlib import Path

MARK = "\ufeff"
"""The byte order mark (EF BB BF in UTF-8) that some editors put at the start of a file; it is no character of its text."""
_KINDS = ((stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"))


def require_regular(path: str | os.PathLike) -> None:
    """Raises ValueError for a named pipe, a socket or a device: reading one could wait forever, or give something else the
    next time. A path that does not exist is let through."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return
    for matches, kind in _KINDS:
        if matches(mode):
            raise ValueError(f"{os.fspath(path)} is {kind}, not a regular file; copy its contents into a file first")


def read_bytes(path: str | os.PathLike) -> bytes:
    """The bytes of a file. Raises ValueError as ``require_regular``, and OSError."""
    require_regular(path)
    return Path(path).read_bytes()


def read_text(path: str | os.PathLike) -> str:
    """The text of a UTF-8 file without a byte order mark; every line ends with a line feed. Raises ValueError as
    ``require_regular`` and for bytes that are not UTF-8, and OSError."""
    require_regular(path)
    return Path(path).read_text(encoding="utf-8-sig")
