"""Memory and disk space of a run, against what this machine has."""

import math
import os
import shutil
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxformer.cost import analytic, memory
from jaxformer.cost.topology import GIB
from jaxformer.data.config import TASKS
from jaxformer.prove.findings import FAILED, OK, WARNING, Finding
from jaxformer.training.config import NEXT_TOKEN, Config
from jaxformer.training.directory import has_saved

EXACT = ("parameters", "optimizer", "gradients")
"""Kinds of buffers whose sizes are exact; the others are an estimate."""


def existing(path: Path) -> Path:
    """The nearest folder above a path that exists."""
    return next(folder for folder in path.absolute().parents if folder.is_dir())


def directory(path: Path, changes: list[str]) -> Finding:
    """Whether the run can be written where it is to be. changes: fields that differ from how the run in it began."""
    subject, where = "run directory", path if path.is_dir() else existing(path)
    if not os.access(where, os.W_OK | os.X_OK):
        return Finding(FAILED, subject, f"{where} cannot be written")
    if not has_saved(path):
        return Finding(OK, subject, f"a new run will be written to {path}")
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
    said = f"{_size(needed)} needed of {_size(available)}: {parts}" + ("" if known else "; activations are not known")
    if exact > available:
        return Finding(FAILED, "memory", said)
    return Finding(WARNING if needed > available else OK, "memory", said)


def limit() -> tuple[float, int]:
    """Bytes of memory that a device has, and how many devices of this process share it."""
    devices = jax.local_devices()
    statistics = devices[0].memory_stats() if devices[0].platform != "cpu" else None
    if statistics and "bytes_limit" in statistics:
        return statistics["bytes_limit"], 1
    return memory.host_bytes() or math.inf, len(devices)


def disk_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def on_disk(config: Config, checkpoint: int) -> Finding:
    """Room for the checkpoints that a run keeps: the newest, the best, and the one that is being written. checkpoint: bytes of
    one."""
    path = Path(config.run_dir)
    train = config.train
    every = min(train.eval_every, train.save_every or train.eval_every, 1 if train.save_minutes else train.eval_every)
    kept = min(train.keep_checkpoints + 2, -(-train.steps // every))
    needed = max(0, kept * checkpoint - disk_bytes(path / "checkpoints"))
    free = shutil.disk_usage(existing(path)).free
    said = f"{kept} checkpoint{'s' * (kept > 1)} of {_size(checkpoint)} at a time; {_size(free)} are free"
    return Finding(OK if needed < free else FAILED, "disk", said)


def _size(size: float) -> str:
    if size == math.inf:
        return "an unknown amount"
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / 2**20:,.2f} MiB"
