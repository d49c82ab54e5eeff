"""Which files a path means: itself, all below a folder, or all that match a glob. Nothing is passed over in silence."""

import difflib
import glob
import os
from pathlib import Path

from jaxformer.config.textfile import require_regular
from jaxformer.data import remote


def files(pattern: str) -> dict[str, Path]:
    """Files by name, sorted; names are relative to the folder, or to the start of the glob that has no wildcards, with '/'.

    What begins with a dot is left out; links are followed; of a URL, the files are copied first (``remote.local``).
    Raises ValueError for a path that is absent, and, naming it, for a folder that cannot be read, a
    link that leads nowhere or in a circle, and for named pipes, sockets and devices.
    """
    pattern = os.path.expanduser(remote.local(pattern))
    require_regular(pattern)
    if os.path.isfile(pattern):
        root, paths = Path(pattern).parent, [Path(pattern)]
    elif os.path.isdir(pattern):
        root, paths = Path(pattern), _below(pattern)
    elif glob.has_magic(pattern):
        root, paths = _matching(pattern)
    else:
        raise ValueError(absent(pattern))
    by_name = {path.relative_to(root).as_posix(): path for path in paths if not os.path.isdir(path)}
    if not by_name:
        raise ValueError(f"no file in folder {pattern}" if os.path.isdir(pattern) else f"no file matches {pattern!r}")
    for path in by_name.values():
        require_regular(path)
        try:
            path.stat()
        except OSError as error:
            why = absent(str(path)) if path.is_symlink() else f"{path} cannot be read: {error.strerror}"
            raise ValueError(why) from error
    return dict(sorted(by_name.items()))


def absent(path: str) -> str:
    """How to report a path that does not exist: the component that is missing, and the nearest name beside it."""
    folder, name = os.path.split(os.path.normpath(path))
    if os.path.islink(path):
        return f"{path} is a link to {os.readlink(path)}, which does not exist or cannot be followed"
    if not os.path.isdir(folder or "."):
        return f"{path} does not exist: there is no folder {folder}"
    close = difflib.get_close_matches(name, _names(folder or "."), n=1)
    return f"{path} does not exist" + (f"; did you mean {os.path.join(folder, close[0])!r}?" if close else "")


def _below(root: str) -> list[Path]:
    """All files below a folder, and what else is there but folders."""
    paths: list[Path] = []
    left = [(root, frozenset({_identity(root)}))]
    while left:
        folder, above = left.pop()
        for name in _names(folder):
            path = os.path.join(folder, name)
            if name.startswith("."):
                continue
            if not os.path.isdir(path):
                paths.append(Path(path))
            elif (identity := _identity(path)) in above:
                raise ValueError(f"{path} is a link to {os.readlink(path)}, a folder that contains the link itself")
            else:
                left.append((path, above | {identity}))
    return paths


def _matching(pattern: str) -> tuple[Path, list[Path]]:
    """The start of a glob that has no wildcards, and what the glob matches."""
    names = Path(pattern).parts
    first = next(i for i, name in enumerate(names) if glob.has_magic(name))
    searched = range(first, len(names) + (names[-1] == "**"))
    for folder in {path for end in searched for path in glob.glob(os.path.join(*names[:end] or "."), recursive=True)}:
        if os.path.isdir(folder):
            _names(folder)  # glob itself passes over a folder that cannot be read
    return Path(*names[:first]), [Path(path) for path in glob.glob(pattern, recursive=True)]


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise ValueError(f"folder {folder} cannot be read: {error.strerror}") from error


def _identity(folder: str) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino
