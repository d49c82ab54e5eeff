"""What to change if a plan does not fit: small changes first, each tried."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxformer.cost.budget import Budget
from jaxformer.cost.plan import ProgramPlan, Trial
from jaxformer.parallel.sharding import ROWS
from jaxformer.training import run

Change = dict[str, Any]
"""``dotted field -> value``."""


def applied(config: run.Config, change: Change) -> run.Config:
    """``config`` with the fields changed."""
    for name, value in change.items():
        section, field = name.split(".")
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{field: value})})
    return config


def flags(change: Change) -> tuple[str, ...]:
    """The change as flags of the command line."""
    return tuple(word for name, value in change.items() for word in (f"--{name.replace('_', '-')}", str(value)))


def changes(config: run.Config, mesh: dict[str, int], training: bool) -> Iterator[tuple[str, Change]]:
    """Changes in the order of what they cost: first single ones, then more and more together."""
    shards = lambda steps: _rows_shards(mesh) >> steps
    if not training:
        for steps in (1, 2, 3):
            if change := _more_tensor(config, mesh, steps):
                yield _over_tensor(change), change
            if (rows := config.data.batch_size >> steps) >= 1 and not rows % shards(0):
                yield f"{rows} rows per batch", {"data.batch_size": rows}
        return
    remat, parts, memory = config.model.execution.remat, config.train.microbatches, Change()
    if config.train.loss_chunk is None:
        memory["train.loss_chunk"] = 512
        yield "logits of 512 positions at a time", dict(memory)
    if remat == "none":
        yield "recompute everything but matrix products in the backward pass", {"model.remat": "dots"}
    if mesh["data"] > 1:
        memory |= {"mesh.data": 1, "mesh.fsdp": mesh["fsdp"] * mesh["data"]}
        yield "spread parameters and optimizer over all devices that have their own rows", dict(memory)
    if remat != "full":
        memory["model.remat"] = "full"
        yield "recompute everything inside a block in the backward pass", dict(memory)
    while not config.data.batch_size % (shards(0) * parts * 2):
        parts *= 2
        memory["train.microbatches"] = parts
        yield f"the batch in {parts} microbatches", dict(memory)
    for steps in (1, 2, 3):
        if change := _more_tensor(config, mesh, steps):
            one_row_each = max(1, config.data.batch_size // shards(steps))
            yield _over_tensor(change), {**memory, **change, "train.microbatches": one_row_each}


def _rows_shards(mesh: dict[str, int]) -> int:
    """Into how many parts the rows of a batch are spread."""
    return math.prod(mesh[axis] for axis in ROWS)


def _over_tensor(change: Change) -> str:
    return f"heads, feed-forward and vocabulary over {change['mesh.tensor']} devices"


def _more_tensor(config: run.Config, mesh: dict[str, int], steps: int) -> Change | None:
    """Twice as many devices for ``tensor``, so many times, taken from data and fsdp; None if something does not divide."""
    factor = 1 << steps
    both, tensor = mesh["data"] * mesh["fsdp"], mesh["tensor"] * factor
    if both % factor or config.model.n_heads % tensor or config.data.batch_size % (_rows_shards(mesh) // factor):
        return None
    return {"mesh.data": 1, "mesh.fsdp": both // factor, "mesh.tensor": tensor}


def search(
    config: run.Config,
    mesh: dict[str, int],
    failing: list[ProgramPlan],
    plan: Callable[[run.Config], list[ProgramPlan]],
    budget: Budget,
    tell: Callable[[str], None],
) -> tuple[Trial, ...]:
    """Tries changes until one fits, or until the next is not expected to end within the budget. ``tell`` is given one line
    before each trial and one after it, as soon as its outcome is known."""
    trials: list[Trial] = []
    last = max(program.compile_seconds for program in failing)
    for text, change in changes(config, mesh, failing[0].name == "training step"):
        if budget.spent + last > budget.seconds:
            tell(f"stopped: {budget.spent:.0f} s of --budget {budget.seconds:g} are spent, and a trial takes {last:.0f} s")
            break
        tell(f"trying: {text}")
        start = time.perf_counter()
        try:
            programs = plan(applied(config, change))
        except ValueError as error:  # refused before compiling
            tell(f"refused: {error}")
            continue
        except TimeoutError as error:
            tell(f"stopped: {error}")
            break
        last = time.perf_counter() - start
        tell(programs[-1].verdict)
        fits = all(program.fits for program in programs)
        trials.append(Trial(text, flags(change), fits, max(program.needed_bytes for program in programs), round(last, 1)))
        if fits:
            break
    return tuple(trials)
