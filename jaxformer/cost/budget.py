"""Compiling within a limit of time."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Budget:
    """Seconds that a plan may take, counted from when this is made; 0 is no limit."""

    seconds: float
    began: float = field(default_factory=time.perf_counter)

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self.began

    def run(self, work: Callable[[], Result], name: str) -> Result:
        """What ``work`` returns or raises. Raises TimeoutError if the budget is spent before it ends: a compiler cannot be
        interrupted, so it goes on in a thread that nobody waits for, not even the process at its end."""
        if not self.seconds:
            return work()
        outcome: list[tuple[Any, BaseException | None]] = []

        def record() -> None:
            try:
                outcome.append((work(), None))
            except BaseException as error:  # raised again by the thread that waits
                outcome.append((None, error))

        thread = threading.Thread(target=record, daemon=True, name=name)
        thread.start()
        thread.join(max(0.0, self.seconds - self.spent))
        if not outcome:
            raise TimeoutError(f"{name}: still compiling when the {self.seconds:g} s of --budget were over")
        result, error = outcome[0]
        if error is not None:
            raise error
        return result
