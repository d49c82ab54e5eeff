"""What XLA's own texts say of a compiled program. This is the only room that reads them, and ``read`` the only way in.

The texts have no specification and no version: they may change with any release. ``TESTED`` names the releases whose texts
these readers were tested with. What they do not understand, ``read`` reports and leaves out.
"""

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxformer.cost.hlo import hlo_cost, text
from jaxformer.cost.hlo.buffers import Dims, Memory, read_buffers
from jaxformer.cost.hlo.collectives import Collective, find_collectives
from jaxformer.cost.topology import Topology

TESTED = {"jax": "0.10.2", "libtpu": "0.0.42.1 or 0.0.52"}


@dataclass(frozen=True)
class Reading:
    """What the texts of one program say; None for what was not understood."""

    memory: Memory | None
    work: hlo_cost.Work | None
    collectives: list[Collective] | None
    problem: str
    """What was not understood, and with which versions; empty if everything was."""


def finished(folder: Path) -> bool:
    """Whether the compiler that dumped its texts to ``folder`` came to its end."""
    return bool(_text(folder, "after_codegen"))


def read(folder: Path, activations: Dims, parameters: Dims, topology: Topology, coordinates: list[tuple[int, ...]]) -> Reading:
    """Reads the texts in a folder that was given to XLA as ``xla_dump_to``.

    activations: the named activations with the dimensions that one device holds of them; parameters: all parameters with their
    full dimensions; coordinates: the place of each device in the torus.
    """
    problems: list[str] = []

    def attempt(what: str, reader: Callable, *sources: Any) -> Any:
        if any(source is None for source in sources):
            return None
        try:
            return reader(*sources)
        except Exception as error:  # in text of another form, any step of a reader may fail
            problems.append(f"{what} ({type(error).__name__}: {error})")
            return None

    assigned = attempt("the optimized program", text.parse, _text(folder, "after_optimizations"))
    final = attempt("the final program", text.parse, _text(folder, "after_codegen")) if finished(folder) else assigned
    sources = [_text(folder, f"after_optimizations-{name}") for name in ("buffer-assignment", "live-range")]
    memory = attempt("the buffer assignment", read_buffers, *sources, assigned, activations, parameters)
    work = attempt("the work of the program", _work, final)
    used = attempt("its collectives", find_collectives, final, topology, coordinates)
    return Reading(memory, work, used, _problem(problems))


def _work(module: text.Module) -> hlo_cost.Work:
    work = hlo_cost.count(module)
    if not work.flops + work.kernel_flops:
        raise ValueError("it has no matrix products")
    return work


def _text(folder: Path, stage: str) -> str:
    """XLA's text of a program at a stage; empty if there is none."""
    path = next(folder.glob(f"*.{stage}.txt"), None)
    return path.read_text() if path else ""


def _problem(problems: list[str]) -> str:
    if not problems:
        return ""
    spelled = lambda versions: " and ".join(f"{name} {version}" for name, version in versions.items())
    written = f"It was written by {spelled(versions())}; the reader was tested with {spelled(TESTED)}"
    return f"XLA's text was not understood, and is left out, in: {'; '.join(problems)}. {written}"


def versions() -> dict[str, str]:
    """The installed versions of the packages in ``TESTED``."""
    installed = {}
    for name in TESTED:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "(not installed)"
    return installed
