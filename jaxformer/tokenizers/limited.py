"""Work that other people's files decide about, done in another process within limits of time and memory.

The process stays for the next call, which then takes some tenths of a millisecond more than the work. On systems without limits
for a process (Windows) only the time that it is waited for is bounded.
"""

import atexit
import contextlib
import hashlib
import importlib.metadata
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from typing import Any

from jaxformer.tokenizers import disk_cache, worker

SECONDS = 1.5
"""Of computing that a call may take, beyond what the size of a large file entitles it to."""
SECONDS_PER_MB = 0.1
MOST_BYTES = 500 << 20
"""Of memory that a call may take."""
MOST_PER_BYTE = 16
PATIENCE = 20.0
"""Seconds of the clock that a call is waited for, on a machine that does other things too."""

_lock = threading.Lock()
_process: subprocess.Popen | None = None
_owner = 0  # the process that started it: one that is forked later must not share its pipes


class LimitError(ValueError):
    """A call took more time or memory than it may, or ended its process."""


def check(name: str, package: str, data: bytes) -> None:
    """Raises ValueError where the worker's function ``name`` refuses a file, does not end in time, takes too much memory or
    dies. That a file is accepted is kept on disk, by its hash and the version of the package that reads it."""
    version = importlib.metadata.version(package)
    key = disk_cache.key("check 1", name, version, hashlib.sha256(data).hexdigest())
    disk_cache.cached("checked", key, lambda: call(name, data, size=len(data)).encode())


def call(name: str, *arguments: Any, size: int = 0) -> str:
    """What the worker's function ``name`` makes of ``arguments``, of plain types. size: bytes of a file among them, which raise
    the limits. Raises ValueError where the function does, and LimitError where it does not keep to the limits."""
    global _process, _owner
    seconds, most = SECONDS + SECONDS_PER_MB * size / 1e6, MOST_BYTES + MOST_PER_BYTE * size
    request = pickle.dumps((name, arguments, seconds, most))
    with _lock:
        if _process is None or _owner != os.getpid() or _process.poll() is not None:
            _stop()
            _process, _owner = _start(), os.getpid()
        timer = threading.Timer(PATIENCE + seconds, _process.kill)
        timer.start()
        try:
            answer = _exchange(_process, request)
        except BaseException:  # an answer that was not read, as at Ctrl-C, would be the next call's
            _stop()
            raise
        finally:
            timer.cancel()
        if answer is None:
            status = _process.wait()
            _stop()
            raise LimitError(_reason(status, seconds, most))
    text = answer[1:].decode("utf-8", "surrogatepass")
    if answer[:1] == worker.FAILED:
        raise ValueError(text)
    return text


def _exchange(process: subprocess.Popen, request: bytes) -> bytes | None:
    """The answer to a request; None where the process ends first."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(struct.pack("<Q", len(request)) + request)
        process.stdin.flush()
    except BrokenPipeError:
        return None
    header = process.stdout.read(8)
    if len(header) < 8:
        return None
    (length,) = struct.unpack("<Q", header)
    answer = process.stdout.read(length)
    return answer if len(answer) == length else None


def _reason(status: int, seconds: float, most: int) -> str:
    if status == worker.NO_ROOM or status == -signal.SIGABRT:  # Rust and C++ give up by aborting
        return f"it takes more than {most >> 20} MB of memory, or its library gives up"
    if status == -getattr(signal, "SIGPROF", 0):
        return f"it takes more than {seconds:.1f} s of computing"
    return f"the process that reads it ended with status {status}, or took more than {PATIENCE + seconds:.0f} s"


def _start() -> subprocess.Popen:
    environment = os.environ | {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-I", worker.__file__, json.dumps(sys.path)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment)


@atexit.register
def _stop() -> None:
    global _process
    process, _process = _process, None
    if process is not None:
        if _owner == os.getpid():
            process.kill()
            process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # of a request that was not read in full
                stream.close()
