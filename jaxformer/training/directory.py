"""The directory of a run: which path is meant, who uses it, and what lies in it."""

import contextlib
import itertools
import json
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxformer.parallel import multihost

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)
LOCK = ".train.lock"
CHECKPOINTS = "checkpoints"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "generation_config.json")
_LEFT = re.compile(
    rf"{re.escape(LOCK)}|{CHECKPOINTS}|tensorboard|.*\.tmp|\.jaxformer-.*|\..+\.[0-9a-f]{{32}}|"
    rf"({'|'.join(map(re.escape, TOKENIZERS))})(\.before\d*)?"
)
"""Names that a start leaves which was killed before it wrote config.json."""


def expanded(path: str) -> str:
    """``path`` with the home directory for a leading ``~``, which shells leave in ``--run-dir=~/run``. Raises ValueError where
    there is none, and where an earlier version made a folder that is called ``~``."""
    home = os.path.expanduser(path)
    if not path.startswith("~"):
        return path
    if home == path:
        raise ValueError(f"{path}: {path.split('/')[0]} has no home directory; write ./{path} for a folder of that name")
    if os.path.exists(os.path.join(path, "config.json")) and not os.path.exists(os.path.join(home, "config.json")):
        raise ValueError(f"{path} means {home}, but there is a run in ./{path}; move that run there, or give ./{path}")
    return home


def saved_steps(directory: Path, folder: str = CHECKPOINTS) -> list[int]:
    """The steps that a run has saved, in order; whether each can be read is for ``Checkpoints`` to say."""
    with contextlib.suppress(OSError):
        return sorted(int(name) for name in os.listdir(directory / folder) if re.fullmatch("0|[1-9][0-9]*", name))
    return []


def has_saved(directory: Path) -> bool:
    """Whether a run has ever saved a step, broken ones included: what it holds is then no longer free to change."""
    try:
        return any(".orbax-checkpoint-tmp" not in name for name in os.listdir(directory / CHECKPOINTS))
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_unbegun(directory: Path) -> bool:
    """Whether a directory without config.json holds nothing but what a start leaves that was killed at once."""
    return all(map(_LEFT.fullmatch, os.listdir(directory))) and not has_saved(directory)


def set_aside(path: Path, ending: str) -> Path:
    """Renames a file to ``<name>.<ending>``, with a number where that exists."""
    names = (path.with_name(f"{path.name}.{ending}{number or ''}") for number in itertools.count())
    kept = next(name for name in names if not os.path.lexists(name))
    path.rename(kept)
    return kept


@contextlib.contextmanager
def beginning(directory: Path) -> Iterator[None]:
    """Inside, a run writes its first files, unless it has saved a step already. A tokenizer that was there and is another is
    kept as ``*.before``: it may be that of a start that was killed, or somebody's."""
    before = [] if has_saved(directory) else [path for name in TOKENIZERS if (path := directory / name).is_file()]
    kept = {path: set_aside(path, "before") for path in before}
    yield
    for path, copy in kept.items():
        if path.is_file() and path.read_bytes() == copy.read_bytes():
            copy.unlink()


@dataclass(frozen=True)
class Lock:
    """The right to write to a run's directory."""

    directory: Path
    refusal: OSError | None = None
    """Why nothing can be written there, if so: a run that is finished can still be shown."""

    def require(self) -> None:
        """Raises the OSError if there is one."""
        if self.refusal is not None:
            raise self.refusal


@contextlib.contextmanager
def locked(run_dir: str) -> Iterator[Lock]:
    """The directory for this run alone, made if it was not there; the first of several processes holds it. Readers are not kept
    out. If nothing has been written at the end, what was made is removed.

    Raises ValueError if another process has it, naming that, or if it cannot be made. A file system without locks is warned of.
    """
    directory, problem = Path(run_dir), None
    with contextlib.ExitStack() as stack:
        lock = Lock(directory)
        if multihost.first():
            try:
                lock = stack.enter_context(_held(directory))
            except ValueError as error:
                problem = error
        if not multihost.everywhere(problem is None):
            raise problem or ValueError(
                f"process 0 could not get the run directory {directory}; its own error message says why"
            )
        yield lock


@contextlib.contextmanager
def _held(directory: Path) -> Iterator[Lock]:
    made: list[Path] = []
    path, file = directory / LOCK, None
    try:
        try:
            made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--run-dir {directory} cannot be used: {_obstacle(directory) or error.strerror}") from error
        try:
            file = _take(path)
            refusal = None
        except OSError as error:
            refusal = error
        yield Lock(directory, refusal)
    finally:
        if file is not None:
            path.unlink(missing_ok=True)  # while it is still held: see _take
            os.close(file)
        for folder in made:
            with contextlib.suppress(OSError):  # not empty, or never made
                folder.rmdir()


def _obstacle(directory: Path) -> str | None:
    """What is in the way of a path."""
    for path in (*reversed(directory.parents), directory):
        if os.path.islink(path) and not os.path.exists(path):
            return f"{path} is a link to {os.readlink(path)}, which does not exist"
        if os.path.lexists(path) and not os.path.isdir(path):
            return f"{path} is a file"
    return None


def _take(path: Path) -> int:
    """A descriptor of the file, locked. Raises ValueError if another process has locked it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            if fcntl is None:
                raise OSError(None, "this system has no flock")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _holder(file)
            os.close(file)
            raise ValueError(f"{path.parent} is in use by {holder}; wait until it ends, or choose another --run-dir") from error
        except OSError as error:
            reason = error.strerror
            log.warning("%s cannot be locked (%s); make sure that no other train.py uses this directory", path.parent, reason)
            return file
        try:
            is_there = os.path.samestat(os.stat(path), os.fstat(file))
        except FileNotFoundError:
            is_there = False
        if is_there:  # else its holder removed it between our opening and locking it
            break
        os.close(file)
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    about = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
    with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
        os.ftruncate(file, 0)
        os.pwrite(file, about.encode(), 0)
    return file


def _holder(file: int) -> str:
    try:
        about = json.loads(os.pread(file, 4096, 0))
        return f"process {about['pid']} on {about['host']}, since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
