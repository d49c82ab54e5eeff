"""What ``cpu.py`` measures, and a side of it: a process that does one step for every line that it reads, and says how long it
took. Needs NumPy alone."""

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Work(NamedTuple):
    """The sizes of a row of the table."""

    does: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    length: int
    batch: int
    vocab: int


WORK = {
    "W1": Work("train", 4, 128, 4, 4, 512, 64, 12, 65),
    "W2": Work("train", 6, 384, 6, 6, 1536, 256, 8, 65),
    "W3": Work("train", 4, 768, 12, 12, 3072, 512, 2, 50_304),
    "W4": Work("forward", 4, 768, 12, 12, 3072, 512, 2, 50_304),
    "W6": Work("train", 4, 512, 8, 2, 1376, 512, 2, 32_000),
}


def serve(work: Work, step: Callable[[np.ndarray], float]) -> None:
    """Answers every line of standard input, a number of steps, with the seconds that each took, the processor time of the
    process until now, its highest resident size in MB and the last value of ``step``."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, work.vocab, (work.batch, work.length + 1), dtype=np.int32)
    for line in sys.stdin:
        seconds, value = [], 0.0
        for _ in range(int(line)):
            start = time.perf_counter()
            value = step(tokens)
            seconds.append(time.perf_counter() - start)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        answer = {"seconds": seconds, "cpu": usage.ru_utime + usage.ru_stime, "mb": usage.ru_maxrss // 1024, "value": value}
        print(json.dumps(answer), flush=True)
