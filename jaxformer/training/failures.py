"""What the operating system refuses during a run, as one line: what was being done, to which path, and what is safe."""

import contextlib
import errno
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from jaxformer.training.directory import saved_steps

_CODES = "ENOSPC EDQUOT EFBIG EROFS EACCES EPERM EIO ENOTDIR EISDIR ENOENT ELOOP ENAMETOOLONG ESTALE EMFILE ENFILE EBUSY"
_REASONS = [os.strerror(getattr(errno, name)) for name in _CODES.split() if hasattr(errno, name)]


class Failed(OSError):
    """The message is one line that is complete."""


@contextlib.contextmanager
def during(what: str, directory: Path, kind: type[Exception] = Exception) -> Iterator[None]:
    """Whatever the operating system refuses inside becomes ``Failed``, for errors of a ``kind``; all others pass.

    what: as in "could not save step 20". directory: of the run. Libraries raise other kinds than OSError, from threads of their
    own and with the reason in their text, which is therefore looked for there too.
    """
    try:
        yield
    except Failed:
        raise
    except kind as error:
        causes = _causes(error)
        for cause in causes:
            if isinstance(cause, Failed):  # what failed afterwards, such as closing what had failed, says less
                raise cause from error
        reason = next(filter(None, map(_reason, causes)), None)
        if reason is None:
            raise
        steps = saved_steps(directory)
        safe = f"the last saved step is {steps[-1]}, from which" if steps else "no step has been saved yet;"
        raise Failed(f"{what}: {reason}; {safe} the same command resumes once this is fixed") from error


def ignore_abandoned_saves() -> None:
    """From now on nothing is printed for the tasks and callbacks that Orbax leaves behind when a save fails: the failure itself
    is raised, and a dozen tracebacks of its threads would bury the line that says so."""
    before = sys.unraisablehook

    def hook(raised) -> None:
        if not (isinstance(raised.exc_value, RuntimeError) and str(raised.exc_value) == "Event loop is closed"):
            before(raised)

    sys.unraisablehook = hook
    warnings.filterwarnings("ignore", "coroutine '.*' was never awaited", RuntimeWarning)
    left = re.compile(r"\w+ exception was never retrieved|Task was destroyed but it is pending")
    logging.getLogger("asyncio").addFilter(lambda record: not left.match(record.getMessage()))


def _causes(error: BaseException) -> list[BaseException]:
    """An error and all that led to it."""
    causes: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        raised = pending.pop(0)
        if raised is not None and not any(raised is cause for cause in causes):
            causes.append(raised)
            pending += [*getattr(raised, "exceptions", ()), raised.__cause__, raised.__context__]
    return causes


def _reason(error: BaseException) -> str | None:
    """``path: reason``; None for an error that is none of the operating system's."""
    if isinstance(error, OSError):
        where = error.filename2 or error.filename
        shown = f"{os.fsdecode(where)}: " if isinstance(where, str | bytes) else ""
        return f"{shown}{error.strerror}" if error.errno is not None else None
    text = str(error)
    reason = next((reason for reason in _REASONS if reason in text), None)
    path = re.search(r"[\"'](/[^\"']+)[\"']", text)
    return f"{path[1]}: {reason}" if path and reason else reason
