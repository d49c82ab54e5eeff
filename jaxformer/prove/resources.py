"""Memory and disk space of a run, against what this machine has."""

import os
import shutil
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxformer.cost import analytic
from jaxformer.cost.topology import GIB
from jaxformer.data.config import TASKS
from jaxformer.prove.findings import FAILED, OK, WARNING, Finding
from jaxformer.training.config import NEXT_TOKEN, Config

EXACT = ("parameters", "optimizer", "gradients")
"""Kinds of buffers whose sizes are exact; the others are an estimate."""
CGROUP = Path("/sys/fs/cgroup/memory.max")


def existing(path: Path) -> Path:
    """The nearest folder above a path that exists."""
    return next(folder for folder in path.absolute().parents if folder.is_dir())


def directory(path: Path, changes: list[str]) -> Finding:
    """Whether the run can be written where it is to be. changes: fields that differ from how the run in it began."""
    subject, where = "run directory", path if path.is_dir() else existing(path)
    if not os.access(where, os.W_OK | os.X_OK):
        return Finding(FAILED, subject, f"{where} cannot be written")
    if not path.is_dir():
        return Finding(OK, subject, f"{path} will be made")
    if changes:
        return Finding(WARNING, subject, f"{path} holds a run that will be continued with changes: {'; '.join(changes)}")
    return Finding(OK, subject, f"{path} holds a run that will be continued; this check begins from fresh parameters")


def in_memory(config: Config, mesh: Mesh) -> Finding:
    """The memory of the update by arithmetic; only what is exact can fail."""
    known = config.data.task in TASKS and config.train.objective == NEXT_TOKEN
    if known:
        sizes = analytic.training_bytes(config, mesh)
    else:
        params, optimizer = analytic.state_bytes(config, mesh)
        sizes = {"parameters": params, "optimizer": optimizer, "gradients": params}
    available, shared = limit()
    sizes = {kind: size * shared for kind, size in sizes.items()}
    needed, exact = sum(sizes.values()), sum(size for kind, size in sizes.items() if kind in EXACT)
    parts = ", ".join(f"{kind} {_size(size)}" for kind, size in sizes.items() if size)
    said = f"{_size(needed)} of {_size(available)}: {parts}" + ("" if known else "; activations are not known")
    if exact > available:
        return Finding(FAILED, "memory", said)
    return Finding(WARNING if needed > available else OK, "memory", said)


def limit() -> tuple[float, int]:
    """Bytes of memory that a device has, and how many devices of this process share it."""
    devices = jax.local_devices()
    statistics = devices[0].memory_stats() if devices[0].platform != "cpu" else None
    if statistics and "bytes_limit" in statistics:
        return statistics["bytes_limit"], 1
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if CGROUP.is_file() and (text := CGROUP.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total, len(devices)


def disk_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def on_disk(config: Config, checkpoint: int) -> Finding:
    """Room for the checkpoints that a run keeps: the newest, the best, and the one that is being written. checkpoint: bytes of
    one."""
    path = Path(config.run_dir)
    kept = min(config.train.keep_checkpoints + 2, -(-config.train.steps // config.train.eval_every))
    needed = max(0, kept * checkpoint - disk_bytes(path / "checkpoints"))
    free = shutil.disk_usage(existing(path)).free
    said = f"{kept} checkpoints of {_size(checkpoint)} at a time; {_size(free)} are free"
    return Finding(OK if needed < free else FAILED, "disk", said)


def _size(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / 2**20:,.2f} MiB"
