"""What happens between evaluations: saves by steps and by the clock, and a trace of some steps."""

import contextlib
import time
from collections.abc import Callable, Iterator

import jax

from jaxformer.parallel import multihost
from jaxformer.parallel.ending import anyone
from jaxformer.training.config import TrainConfig, profiled_steps
from jaxformer.training.report import Report


def due(train: TrainConfig) -> Callable[[int], bool]:
    """A function that every process calls after each update without an evaluation: whether to save, by ``train.save_every`` or
    by the clock of any of them."""
    saved, just_saved = time.monotonic(), False
    is_late = anyone(lambda: time.monotonic() - saved >= 60 * train.save_minutes)

    def is_due(step: int) -> bool:
        nonlocal saved, just_saved
        late = train.save_minutes > 0 and is_late()
        # Several processes get an answer one call late: the one after a save was given before it.
        just_saved = (late and not just_saved) or bool(train.save_every and step % train.save_every == 0)
        saved = time.monotonic() if just_saved else saved
        return just_saved

    return is_due


@contextlib.contextmanager
def profiled(train: TrainConfig, report: Report) -> Iterator[Callable[[int], None]]:
    """A function to be called before the update of each step: it traces those of the steps that ``train.profile`` names which
    are still to come, in the first process. A trace ends with the block at the latest."""
    steps, target = profiled_steps(train.profile, train.steps), report.directory / "profile"
    is_tracing = False

    def stop() -> None:
        nonlocal is_tracing
        if is_tracing:
            is_tracing = False
            jax.profiler.stop_trace()
            report.console.print(f"the trace is in {target}; view it with xprof {target}", soft_wrap=True)

    def before(step: int) -> None:
        nonlocal is_tracing
        if is_tracing and step not in steps:
            report.settle()  # waits for the last of the steps, which has only been dispatched
            stop()
        if not is_tracing and step in steps and multihost.first():
            jax.profiler.start_trace(target)
            is_tracing = True

    try:
        yield before
    finally:
        stop()
