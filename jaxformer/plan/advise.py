"""What to change where a plan does not fit: small changes first, each tried."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxformer.parallel.sharding import ROWS
from jaxformer.plan.record import ProgramPlan, Trial
from jaxformer.training import run

Change = dict[str, Any]
"""``dotted field -> value``."""


def applied(config: run.Config, change: Change) -> run.Config:
    """``config`` with the fields changed."""
    for name, value in change.items():
        part, field = name.split(".")
        config = dataclasses.replace(config, **{part: dataclasses.replace(getattr(config, part), **{field: value})})
    return config


def flags(change: Change) -> tuple[str, ...]:
    """The change as ``train.py`` takes it."""
    return tuple(part for name, value in change.items() for part in (f"--{name.replace('_', '-')}", str(value)))


def changes(config: run.Config, mesh: dict[str, int], training: bool) -> Iterator[tuple[str, Change]]:
    """Changes in the order in which they cost something: first single ones, then more and more together."""
    if not training:
        for steps in (1, 2, 3):
            if change := _spread(config, mesh, steps):
                yield f"{change['mesh.tensor']} devices for heads, feed-forward and vocabulary", change
            if (rows := config.data.batch_size >> steps) >= 1 and not rows % _over(mesh):
                yield f"{rows} rows a batch", {"data.batch_size": rows}
        return
    memory: Change = {}
    if config.train.loss_chunk is None:
        memory["train.loss_chunk"] = 512
        yield "logits of 512 positions at a time", dict(memory)
    if config.model.execution.remat == "none":
        yield "recompute all but matrix products in the backward pass", {"model.remat": "dots"}
    if mesh["data"] > 1:
        memory |= {"mesh.data": 1, "mesh.fsdp": mesh["fsdp"] * mesh["data"]}
        yield "parameters and optimizer spread over all devices that have rows of their own", dict(memory)
    if config.model.execution.remat != "full":
        memory["model.remat"] = "full"
        yield "recompute everything inside a block in the backward pass", dict(memory)
    parts = config.train.microbatches
    while not config.data.batch_size % (_over(mesh) * parts * 2):
        parts *= 2
        memory["train.microbatches"] = parts
        yield f"the batch in {parts} parts, one after another", dict(memory)
    for steps in (1, 2, 3):
        if change := _spread(config, mesh, steps):
            whole = {**memory, **change}
            whole["train.microbatches"] = _parts(config, mesh["tensor"] << steps, mesh)
            yield f"{change['mesh.tensor']} devices for heads, feed-forward and vocabulary", whole


def _over(mesh: dict[str, int]) -> int:
    return math.prod(mesh[axis] for axis in ROWS)


def _parts(config: run.Config, tensor: int, mesh: dict[str, int]) -> int:
    """Microbatches of one row a device."""
    over = _over(mesh) * mesh["tensor"] // tensor
    return max(1, config.data.batch_size // over)


def _spread(config: run.Config, mesh: dict[str, int], steps: int) -> Change | None:
    """So many times twice the devices for tensor, taken from data and fsdp; None where heads do not divide."""
    factor = 1 << steps
    both, tensor = mesh["data"] * mesh["fsdp"], mesh["tensor"] * factor
    if both % factor or config.model.n_heads % tensor or config.data.batch_size % (_over(mesh) // factor):
        return None
    return {"mesh.data": 1, "mesh.fsdp": both // factor, "mesh.tensor": tensor}


def search(
    config: run.Config,
    mesh: dict[str, int],
    failing: list[ProgramPlan],
    make: Callable[[run.Config], list[ProgramPlan]],
    budget: float,
    tell: Callable[[str], None],
) -> tuple[Trial, ...]:
    """Tries changes until one fits, and as long as the next is expected to end within ``budget`` seconds."""
    trials: list[Trial] = []
    began, last = time.perf_counter(), max(program.compile_seconds for program in failing)
    for text, change in changes(config, mesh, failing[0].name == "training step"):
        spent = time.perf_counter() - began
        if spent + last > budget:
            tell(f"stopped looking: {spent:.0f} s of --budget {budget:g} are spent, and a try takes {last:.0f} s")
            break
        tell(f"trying: {text}")
        at = time.perf_counter()
        try:
            found = make(applied(config, change))
        except ValueError as error:  # refused before compiling
            tell(f"refused: {error}")
            continue
        last = time.perf_counter() - at
        fits = all(program.fits for program in found)
        needed = max(program.needed_bytes for program in found)
        trials.append(Trial(text, flags(change), fits, needed, round(last, 1)))
        if fits:
            break
    return tuple(trials)
