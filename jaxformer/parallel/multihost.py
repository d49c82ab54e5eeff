"""Several processes that run one program: how they find each other, what they agree on, and how they end together.

All of them run the same steps on arrays that lie on the devices of all; only the first one writes what a person reads.
"""

import contextlib
import ctypes
import hashlib
import math
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxformer.config.strict import Strict, to_json, within
from jaxformer.parallel.exit_codes import FAILED, INTERRUPTED

LOST = "error: another process was lost ({}). The same command resumes from the last checkpoint, on any number of processes."
_SIGNS = re.compile(
    r"\bGloo\b|\b(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED)\b|coordination service|barrier|Connection (closed|reset|refused)"
)
"""What errors of a collective or of JAX's coordination service say where the other side is gone."""

SHOWN_WITHIN = 60.0
"""Seconds within which a network file system shows everywhere what was written on one machine."""


@dataclass(frozen=True)
class DistributedConfig(Strict):
    """The other processes of the run: none unless auto, or coordinator, num_processes and process_id are given."""

    auto: bool = False
    """Let JAX find the other processes, as it can on TPU pods and under Slurm, Open MPI and Kubernetes."""
    coordinator: str | None = None
    """Address of process 0 as host:port, which all others must be able to reach."""
    num_processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """Number of this process, counted from 0."""
    heartbeat_timeout: int = 60
    """Seconds without a heartbeat after which a process counts as lost. A broken connection is noticed at once."""
    start_timeout: int = 300
    """Seconds to wait at the start until all processes have connected."""

    def __post_init__(self):
        super().__post_init__()
        within(self, 1, math.inf, "num_processes", "heartbeat_timeout", "start_timeout", prefix="distributed.")
        within(self, 0, math.inf, "process_id", prefix="distributed.")
        fields = {name: getattr(self, name) for name in ("coordinator", "num_processes", "process_id")}
        absent = [f"distributed.{name}" for name, value in fields.items() if value is None]
        if self.auto and len(absent) < len(fields):
            raise ValueError("distributed.auto finds coordinator, num_processes and process_id itself; give it alone")
        if 0 < len(absent) < len(fields):
            raise ValueError(f"processes need three fields to find each other; also give {' and '.join(absent)}")
        if self.coordinator is not None and not re.fullmatch(r"(\[[^\]]+\]|[^:\s]+):\d{1,5}", self.coordinator):
            raise ValueError(f"distributed.coordinator={self.coordinator!r} must be host:port, such as 10.0.0.1:1234")
        if self.process_id is not None and self.num_processes is not None and self.process_id >= self.num_processes:
            raise ValueError(
                f"distributed.process_id={self.process_id} must be below distributed.num_processes={self.num_processes}"
            )

    @property
    def on(self) -> bool:
        """Whether there are others to be found."""
        return self.auto or self.coordinator is not None


@contextlib.contextmanager
def joined(config: DistributedConfig) -> Iterator[None]:
    """With the other processes, if ``config`` names any. To be entered before anything asks JAX for its devices.

    What is raised inside ends this process, and thereby the others, which say that one was lost. Raises ValueError where this
    process is one of several that have not been connected.
    """
    if not config.on:
        _refuse_strangers()
        yield
        return
    try:
        _start(config)
        yield
        jax.distributed.shutdown()  # once all have come here
    except BaseException as error:
        _end(error)
    finally:
        signal.signal(signal.SIGABRT, signal.SIG_DFL)


def _start(config: DistributedConfig) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, which ``ending.stopping`` is for
    where = "no cluster that JAX knows" if config.auto else f"of {config.num_processes}, process 0 at {config.coordinator}"
    alone = f"error: the processes did not find each other within {config.start_timeout} s ({where})"
    _speak_when_aborted(alone)
    try:
        jax.distributed.initialize(
            config.coordinator,
            config.num_processes,
            config.process_id,
            initialization_timeout=config.start_timeout,
            heartbeat_timeout_seconds=config.heartbeat_timeout,
        )
    except (RuntimeError, ValueError) as error:
        raise SystemExit(f"{alone}: {str(error).splitlines()[0]}") from error
    _speak_when_aborted(LOST.format("probably; this process was aborted for the reason above"))


def _refuse_strangers() -> None:
    tasks = os.environ.get("SLURM_NTASKS", "1") if "SLURM_PROCID" in os.environ else "1"
    if tasks != "1" and "SLURM_STEP_ID" in os.environ:
        raise ValueError(f"Slurm runs {tasks} copies of this program; give --distributed.auto, or each would train alone")
    ranks = os.environ.get("OMPI_COMM_WORLD_SIZE", "1")
    if ranks != "1":
        raise ValueError(f"Open MPI runs {ranks} copies of this program; give --distributed.auto, or each would train alone")
    if jax.process_count() > 1:
        raise ValueError(f"this is one of {jax.process_count()} processes of a TPU pod; give --distributed.auto on each")


def _end(error: BaseException) -> None:
    """Ends this process at once. To wait for the others, as Python's exit does, would be to wait for those that hang."""
    code = FAILED
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        _say(f"{error.code}\n" if isinstance(error.code, str) else "")
    elif isinstance(error, KeyboardInterrupt):
        code = INTERRUPTED
    elif isinstance(error, ValueError | OSError | FloatingPointError) and not _is_of_the_runtime(error):
        _say(f"error: {error}\n")
        time.sleep(1)  # what is refused here is refused by all: each says so before this one's end ends it
    elif _SIGNS.search(str(error)):
        _say(LOST.format(f"{str(error).splitlines()[0]:.200}") + "\n")
    else:
        _say("".join(traceback.format_exception(error)))
    sys.stdout.flush()
    os._exit(code)


def _is_of_the_runtime(error: BaseException) -> bool:
    """Whether an error comes from a connection, or from XLA, which raises some of its own as ValueError."""
    return isinstance(error, ConnectionError) or re.match(r"[A-Z_]+: ", str(error)) is not None


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _speak_when_aborted(words: str) -> None:
    """JAX's coordination service aborts the process where another is lost, from a thread of its own and with no way for Python
    to hear of it but the signal, whose Python handlers only the main thread would run, which waits for the lost one."""

    def speak(number: int) -> None:
        os.write(2, (words + "\n").encode())
        os._exit(FAILED)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(speak)
    _HANDLERS.append(handler)
    ctypes.CDLL(None).signal(int(signal.SIGABRT), handler)


_HANDLERS: list[Any] = []
"""What C still knows by address must not be collected."""


# What they agree on


def first() -> bool:
    """Whether this process is the one that writes."""
    return jax.process_index() == 0


def agree(what: str, value: Any) -> None:
    """Waits for all. Raises ValueError in every process unless ``value`` reads the same in all of them."""
    if jax.process_count() == 1:
        return
    text = to_json(value) if isinstance(value, Strict) else str(value)
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32)
    digests = multihost_utils.process_allgather(digest)
    others = [number for number, row in enumerate(digests) if (row != digests[0]).any()]
    if others:
        raise ValueError(f"process {', '.join(map(str, others))} has another {what} than process 0; this one: {text:.300}")


def all_of(array: np.ndarray) -> np.ndarray:
    """What every process has under that name, stacked along a new first axis: [processes, ...]."""
    return array[None] if jax.process_count() == 1 else np.asarray(multihost_utils.process_allgather(array))


def everywhere(fact: bool) -> bool:
    """Whether it is so in all processes."""
    return fact if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.int32(fact)).all())


def shared(path: Path) -> None:
    """Waits for all. Raises ValueError unless every process sees the file that the first has written."""
    agree("place for its results", path)
    patience = time.monotonic() + SHOWN_WITHIN
    while not path.exists() and time.monotonic() < patience:
        time.sleep(0.1)
    if not everywhere(path.exists()):
        raise ValueError(f"not every process sees {path}; --run-dir must be on a file system that all of them share")


def from_first(number: int) -> int:
    """The first process's number, in all."""
    return number if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def to_numpy(x: Any) -> np.ndarray:
    """An array as every process has it, wherever its parts lie."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)


def put(tree: Any, shardings: Any) -> Any:
    """``jax.device_put`` of a tree that every process holds completely: each fills its own devices."""

    def put_one(x, sharding):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return x if x.sharding.is_equivalent_to(sharding, x.ndim) else jax.jit(lambda x: x, out_shardings=sharding)(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    if isinstance(shardings, jax.sharding.Sharding):
        return jax.tree.map(lambda x: put_one(x, shardings), tree)
    return jax.tree.map(put_one, tree, shardings)
