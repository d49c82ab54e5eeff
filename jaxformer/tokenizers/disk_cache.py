"""Results kept on disk under the hash of what they were made from. A damaged entry is made again, never trusted."""

import hashlib
import os
import uuid
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size


def folder() -> Path:
    """``$JAXFORMER_CACHE``, else ``$XDG_CACHE_HOME/jaxformer``, else ``~/.cache/jaxformer``."""
    if directory := os.environ.get("JAXFORMER_CACHE"):
        return Path(directory).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxformer"


def key(*values: str | int | Iterable[str]) -> str:
    """Hex hash of strings, numbers and sequences of strings, lengths included, so that no value runs into the next."""
    digest = hashlib.sha256()
    for value in values:
        texts = [str(value)] if isinstance(value, str | int) else list(value)
        digest.update(b"%d;" % len(texts))
        for text in texts:
            data = text.encode("utf-8")
            digest.update(b"%d:" % len(data))
            digest.update(data)
    return digest.hexdigest()


def cached(kind: str, name: str, make: Callable[[], bytes]) -> bytes:
    """The bytes of ``make()``, from disk where an intact copy exists. A folder that cannot be written only warns."""
    path = folder() / f"{kind}-{name}"
    try:
        entry = path.read_bytes()
    except OSError:
        entry = b""
    payload = entry[_DIGEST:]
    if entry[:_DIGEST] == _check(kind, name, payload):
        return payload
    payload = make()
    try:
        write(path, _check(kind, name, payload) + payload)
    except OSError as error:
        warnings.warn(f"cannot cache {kind}: {error}. Set JAXFORMER_CACHE to a folder that can be written", stacklevel=2)
    return payload


def target(path: str | os.PathLike) -> Path:
    """``path`` with ``~`` expanded. Raises ValueError, before there is anything to write, where no file can be written."""
    file = Path(os.path.expanduser(path))
    if file.is_dir():
        raise ValueError(f"{file} is a folder; give the path of a file")
    if not file.parent.is_dir():
        raise ValueError(f"{file} cannot be written: {file.parent} is not a folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"{file} cannot be written: permission denied")
    return file


def write(path: Path, data: bytes) -> None:
    """Writes the whole file or nothing: readers see the old file until the new one is complete. A device or a pipe is written
    to, a link is followed: neither is replaced by a file. Raises OSError that names ``path``."""
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        path = path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".jaxformer-{uuid.uuid4().hex}")
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # else a power cut could leave the name without the content
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _check(kind: str, name: str, payload: bytes) -> bytes:
    # The name is part of the checksum: an intact entry under another's name is damage too.
    digest = hashlib.sha256(f"{kind}-{name}:".encode())
    digest.update(payload)
    return digest.digest()
