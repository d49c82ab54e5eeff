"""How training ends early: the signals that ask it to stop and save."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


@contextlib.contextmanager
def stopping(also: Callable[[], bool] = lambda: False) -> Iterator[Callable[[], bool]]:
    """A function that every process calls once a step: whether one of them has been asked to stop, by Ctrl-C, SIGTERM, SIGHUP
    (unless that is ignored, as under nohup) or ``also``.

    All get the same answer at the same step. With several, it is that of the step before, so that nobody waits for it. A
    second Ctrl-C raises KeyboardInterrupt at once; other signals may come as often as they like.
    """
    asked: list[int] = []

    def ask(number, frame):
        if number == signal.SIGINT:
            if number in asked:
                raise KeyboardInterrupt
            with contextlib.suppress(OSError):  # not print, which a signal handler must not call
                os.write(2, b"\nStopping after this step, then saving. Press Ctrl-C again to stop at once without saving.\n")
        asked.append(number)

    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    ignored = [number for number in numbers if number != signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN]
    old = {number: signal.signal(number, ask) for number in numbers if number not in ignored}
    is_asked = lambda: bool(asked) or also()
    try:
        yield anyone(is_asked)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def anyone(is_asked: Callable[[], bool]) -> Callable[[], bool]:
    """A function that every process calls once a step: whether ``is_asked()`` of any of them holds. All get the same answer at
    the same step; with several, that of the step before, so that nobody waits for it."""
    if jax.process_count() == 1:
        return is_asked
    mesh = Mesh(np.asarray(jax.devices()), ("all",))
    each, all_ = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("all",), ()))
    any_ = jax.jit(lambda x: x.any(), out_shardings=all_)
    before: list[jax.Array] = []

    def stop() -> bool:
        asked_here = is_asked()
        before.append(any_(jax.make_array_from_callback((mesh.size,), each, lambda _: np.array([asked_here]))))
        return len(before) > 1 and bool(before.pop(0))

    return stop
