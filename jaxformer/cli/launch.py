"""How every program ends: with its result, or with one line that says what was wrong; and with an exit code."""

import contextlib
import io
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from jaxformer.parallel.exit_codes import CLOSED, INTERRUPTED


def launch(program: Callable[[], Any]) -> None:
    """Runs a program. What a user can mend ends it with one line on standard error instead of a traceback; any other error is a
    fault of the code and keeps its traceback. Characters that the console does not have are replaced."""
    open_output()
    try:
        program()
        sys.stdout.flush()  # a full disk or a closed pipe is found here rather than after the last line of the program
    except KeyboardInterrupt:
        _leave(INTERRUPTED)
    except BrokenPipeError:
        _leave(CLOSED)
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich has caught it
            _leave(CLOSED)
        raise
    except (ValueError, FloatingPointError, OSError) as error:
        _leave(f"error: {described(error)}")


def described(error: Exception) -> str:
    """The text of an error; of one that the operating system raised, its reason and the path; of one that was raised through
    code of the user's own, such as a component, also the line there."""
    if not isinstance(error, OSError) or not error.strerror:
        return (str(error) or type(error).__name__) + _in_user_code(error)
    paths = " -> ".join(str(path) for path in (error.filename, error.filename2) if path is not None)
    return f"{paths}: {error.strerror}" if paths else error.strerror


def _in_user_code(error: Exception) -> str:
    """The innermost line that the library has called in a file of no installed package; empty where there is none."""
    library = os.path.realpath(Path(__file__).parents[1]) + os.sep
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")]
    installed = (library, *(os.path.realpath(folder) + os.sep for folder in folders))
    where, is_called = "", False
    for frame in traceback.extract_tb(error.__traceback__):
        file = os.path.realpath(frame.filename)
        if file.startswith(library):
            is_called |= file != os.path.realpath(__file__)
        elif is_called and os.path.isfile(file) and not file.startswith(installed):
            where = f"\n  in {file}, line {frame.lineno}, {frame.name}: {frame.line}"
    return where


@contextlib.contextmanager
def opened(path: Path | None) -> Iterator[TextIO]:
    """The file to write on with, or standard output. An OSError, also of closing it, names the file."""
    if path is None:
        yield sys.stdout
        return
    try:
        with path.open("a", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be written: {error.strerror}") from error


def open_output() -> None:
    """Replaces a standard stream that was closed before the program began, and makes a strict one replace characters."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - it stays open like the one it replaces
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")


def _leave(status: int | str) -> None:
    """Exits. The interpreter writes at its exit what is still buffered: where that fails, it is dropped."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(status)
