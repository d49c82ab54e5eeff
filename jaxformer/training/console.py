"""Printing: text as it is, on any console; a closed or full output does not end the program."""

import logging
import os
import sys

from rich.console import Console
from rich.logging import RichHandler


class RunConsole(Console):
    """A console that takes no text for markup or emoji: paths, prompts, samples and names of metrics may hold brackets and
    colons. It survives its output: when that is closed or full, ``is_lost`` is set, and the rest is dropped."""

    def __init__(self, quiet: bool = False):
        self._output = _Output()
        super().__init__(file=self._output, quiet=quiet, markup=False, emoji=False, highlight=False)  # type: ignore[arg-type]

    @property
    def is_lost(self) -> bool:
        """Whether nobody reads what is printed any more, as after ``train.py | head``."""
        return self._output.is_lost


class _Output:
    """The standard output of the moment, without its errors."""

    def __init__(self):
        self.is_lost = False

    def __getattr__(self, name: str):
        return getattr(sys.stdout, name)

    def write(self, text: str) -> int:
        try:
            return sys.stdout.write(text)
        except OSError:
            self._lose()
            return len(text)

    def flush(self) -> None:
        try:
            sys.stdout.flush()
        except OSError:
            self._lose()

    def _lose(self) -> None:
        self.is_lost = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # what is still buffered is flushed once more at exit
        os.close(nowhere)


def show_log(console: Console) -> None:
    """Prints the library's log messages on the console, such as which kernel computes attention."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # what fails in Orbax's threads is raised by its next call as well
    log = logging.getLogger("jaxformer")
    if console.quiet:  # not the first of several processes: warnings go where they would without a console
        return
    log.handlers = [RichHandler(console=console, show_time=False, show_path=False, show_level=False)]
    log.setLevel(logging.INFO)
    # Importing Orbax gives the root logger a handler of its own, which would print everything once more.
    log.propagate = any(type(handler) is not logging.StreamHandler for handler in logging.getLogger().handlers)
