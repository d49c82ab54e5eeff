"""The exit codes of all programs, and what their ``--help`` says of them."""

FINISHED = 0
"""Training: all steps are done. All other programs: done."""
FAILED = 1
"""Refused or failed; a message on standard error says why."""
USAGE = 2
"""The command line could not be read."""
STOPPED = 75
"""Training was asked to stop before the last step, and has saved. EX_TEMPFAIL of sysexits.h, "try again"."""
INTERRUPTED = 130
"""Ctrl-C; in training, twice or before the first step: nothing has been saved since the last checkpoint. 128 + SIGINT."""
CLOSED = 141
"""The reader of the output has closed it. 128 + SIGPIPE, as a shell reports that signal."""

OF_TRAINING = (
    f"Exit codes: {FINISHED}, all steps are done; {FAILED}, an error, which standard error explains; {USAGE}, the command line "
    f"could not be read; {STOPPED}, stopped by Ctrl-C, SIGTERM, SIGHUP or a closed output after saving, so that the same "
    f"command resumes the run; {INTERRUPTED}, stopped at once by a second Ctrl-C, or by one before the first step."
)


def below(text: str | None, **meanings: str) -> str:
    """The docstring of a program as its ``--help`` shows it, without the marks of code, and the exit codes below it. meanings:
    those of ``described``."""
    return f"{(text or '').replace('``', '')}\n{described(**meanings)}"


def described(done: str = "done", failed: str = "an error, which standard error explains") -> str:
    """The exit codes of a program other than training. done, failed: what 0 and 1 mean."""
    return (
        f"Exit codes: {FINISHED}, {done}; {FAILED}, {failed}; {USAGE}, the command line could not be read; {INTERRUPTED}, "
        f"interrupted by Ctrl-C; {CLOSED}, the reader of the output closed it."
    )
