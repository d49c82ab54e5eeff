"""Memory of the process between the steps of a program that runs on CPUs.

XLA allocates the temporary arrays of a compiled program when it runs and frees them when it ends. The allocator of glibc gives
such large blocks back to the operating system at once and asks for new ones in the next step, which the system fills with zeros
page by page: a quarter of the time of a training step. ``keep_memory`` lets the process keep them.
"""

import contextlib
import ctypes
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import jax

OFF = "JAXFORMER_KEEP_MEMORY"
"""Environment variable: 0 leaves the allocator as it is."""
GROWTH = 1.25
"""How much larger than usual the process may be after a step before what is free is given back."""
# From malloc.h: no block is mapped by itself, the end of the heap is never given back, and all threads share one heap.
_OPTIONS = {"M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1), "M_ARENA_MAX": (-8, 1)}
_VARIABLES = ("ARENA_MAX", "MMAP_MAX_", "MMAP_THRESHOLD_", "TRIM_THRESHOLD_", "TOP_PAD_")

_FIRST = 3
"""Steps after each of which free memory is given back: blocks take their final places in them."""

_is_kept = False
_to_trim = _FIRST
"""Steps that are still to be followed by a trim."""
_limit: float | None = None
"""Bytes from which on the process is trimmed again; None: to be set after the next step."""


def keep_memory() -> bool:
    """Makes the C library keep freed memory in this process instead of giving it back to the operating system, and says whether
    it does. With glibc on Linux, training on CPUs becomes up to a third faster; elsewhere this does nothing.

    To be called before JAX computes anything, because threads that have started keep heaps of their own. The process then holds
    on to the most memory that it has ever used. Does nothing where the user has chosen the allocator's options
    (MALLOC_ARENA_MAX and its like, or glibc.malloc in GLIBC_TUNABLES), and with JAXFORMER_KEEP_MEMORY=0.
    """
    global _is_kept
    libc = _glibc()
    if libc is not None and os.environ.get(OFF) != "0" and not _is_chosen():
        _is_kept = all([libc.mallopt(option, value) for option, value in _OPTIONS.values()])
    return _is_kept


def after_step(results: Any) -> None:
    """To be called after every step of a loop: does nothing unless the process keeps memory. Waits for ``results``, because the
    temporary arrays of two steps would exist side by side, and gives free memory back to the operating system after the first
    steps, as compilation leaves much, and where the process has grown since: evaluation needs other arrays, and sometimes a
    block no longer fits where it was."""
    global _limit, _to_trim
    if not _is_kept:
        return
    with contextlib.suppress(Exception):  # a step that failed says so where its results are read
        jax.block_until_ready(results)
    if not _to_trim and _limit is not None and resident() > _limit:
        _to_trim, _limit = 1, None
    if _to_trim:
        _glibc().malloc_trim(0)
        _to_trim -= 1
    elif _limit is None:
        _limit = GROWTH * resident()


def is_kept() -> bool:
    """Whether this process keeps freed memory."""
    return _is_kept


def resident() -> int:
    """Bytes of memory that the process has, on Linux."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def _is_chosen() -> bool:
    """Whether the environment sets options of the allocator."""
    is_set = any(f"MALLOC_{name}" in os.environ for name in _VARIABLES)
    return is_set or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")


def _glibc() -> Any:
    """The C library of the process, or None where it is not glibc."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
