"""Text in a bucket or on a web server: copied once into the cache, and again where it has changed."""

import contextlib
import glob
import json
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock

from jaxformer.tokenizers import disk_cache

EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}
"""URL scheme -> extra of this package; of all others ``remote``."""
STATE = (
    "ETag",
    "etag",
    "Content-MD5",
    "md5Hash",
    "crc32c",
    "generation",
    "Last-Modified",
    "LastModified",
    "mtime",
    "created",
    "size",
)
"""What file systems say about the content of a file; which of these they know differs."""
INDEX = ".index.json"


def is_url(path: str) -> bool:
    """Whether a path has a scheme, such as gs://."""
    return re.match(r"[a-z][a-z0-9+.-]*://", path, re.IGNORECASE) is not None


def local(path: str) -> str:
    """``path`` itself or, of a URL, a local copy of the file, or a folder with copies of the files of the folder or glob.

    A file is copied where it is new, or where the file system says that it has changed; several processes take turns. Raises
    ValueError, naming the URL, where the package for its file system is not installed, where it cannot be read, and where it
    has no files.
    """
    if not is_url(path):
        return path
    with _named(path):
        from fsspec.core import url_to_fs

        system, root = url_to_fs(path)
        remote, base = _files(system, root)
    if not remote:
        raise ValueError(f"no file at {path}")
    folder = disk_cache.folder() / "remote" / disk_cache.key(path)[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")), _named(path):
        _copy(system, remote, base, folder)
    return str(folder / _relative(root, base) if set(remote) == {root} else folder)


def _files(system: Any, root: str) -> tuple[dict[str, Any], str]:
    """What the file system says of each file, by path, and the folder that their names are relative to."""
    if glob.has_magic(root):
        parts = root.split("/")
        base = "/".join(parts[: next(number for number in range(len(parts)) if glob.has_magic(parts[number]))])
        matches = system.glob(root, detail=True)
        return {path: info for path, info in matches.items() if info["type"] == "file"}, base
    if system.isdir(root):
        return system.find(root, detail=True), root.rstrip("/")
    return {root: system.info(root)}, root.rpartition("/")[0]


def _copy(system: Any, remote: dict[str, Any], base: str, folder: Path) -> None:
    """Makes ``folder`` hold the files, and no others. The index names what is complete."""
    try:
        index = json.loads((folder / INDEX).read_bytes())
    except (OSError, ValueError):
        index = {}
    states = {path: {name: str(info[name]) for name in STATE if name in info} for path, info in remote.items()}
    wanted = {_relative(path, base): (path, state) for path, state in states.items()}
    for name in set(index) - set(wanted):
        (folder / name).unlink(missing_ok=True)
    index = {name: state for name, state in index.items() if name in wanted}
    for name, (path, state) in sorted(wanted.items()):
        copy = folder / name
        if index.get(name) == state and copy.is_file():
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{uuid.uuid4().hex}"  # a name with a dot is no text
        try:
            system.get_file(path, str(partial))
            os.replace(partial, copy)
        finally:
            partial.unlink(missing_ok=True)
        index[name] = state
        disk_cache.write(folder / INDEX, json.dumps(index).encode())
    disk_cache.write(folder / INDEX, json.dumps(index).encode())


@contextlib.contextmanager
def _named(url: str) -> Iterator[None]:
    """Whatever fails inside is a ValueError that names the URL."""
    try:
        yield
    except ImportError as error:
        extra = EXTRAS.get(url.split("://")[0].lower(), "remote")
        raise ValueError(f"{url} needs another package ({error}): pip install 'jaxformer[{extra}]'") from error
    except ValueError as error:
        raise ValueError(f"{url} cannot be read: {error}") from error
    except Exception as error:  # every file system has errors of its own
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{url} cannot be read: {reason}") from error


def _relative(path: str, base: str) -> str:
    """A file's name below ``base``. Raises ValueError for one that would lie outside of the copy."""
    name = PurePosixPath(path.removeprefix(base).lstrip("/"))
    if name.is_absolute() or ".." in name.parts or not name.parts:
        raise ValueError(f"{path} does not lie below {base}")
    return str(name)
