"""What happens between evaluations: saves by steps and by the clock, and a trace of some steps."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from jaxformer.parallel import multihost
from jaxformer.parallel.ending import anyone
from jaxformer.training.config import TrainConfig, profiled_steps


def due(train: TrainConfig) -> Callable[[int], bool]:
    """A function that every process calls after each update without an evaluation: whether to save, by ``train.save_every`` or
    by the clock of any of them."""
    saved = time.monotonic()
    is_late = anyone(lambda: time.monotonic() - saved >= 60 * train.save_minutes)

    def is_due(step: int) -> bool:
        nonlocal saved
        late = train.save_minutes > 0 and is_late()
        if not late and not (train.save_every and step % train.save_every == 0):
            return False
        saved = time.monotonic()
        return True

    return is_due


@contextlib.contextmanager
def profiled(train: TrainConfig, directory: Path, say: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    """A function to be called before the update of each step: it traces the steps that ``train.profile`` names, in the first
    process. A trace ends with the block at the latest. say: what a line is printed with."""
    steps, target = profiled_steps(train.profile, train.steps), directory / "profile"
    is_tracing = False

    def stop() -> None:
        nonlocal is_tracing
        if is_tracing:
            is_tracing = False
            jax.profiler.stop_trace()
            say(f"trace of steps {steps[0]} to {steps[-1]} in {target}: look at it with xprof {target}")

    def before(step: int) -> None:
        nonlocal is_tracing
        if steps and step == steps[-1] + 1:
            stop()
        if steps and step == steps[0] and multihost.first():
            jax.profiler.start_trace(target)
            is_tracing = True

    try:
        yield before
    finally:
        stop()
