"""Compiling for chips that are not there, and the plan of what comes of it."""

import contextlib
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxformer.cost import hlo
from jaxformer.cost.plan import CollectiveSum, ProgramPlan, Time
from jaxformer.cost.programs import Program
from jaxformer.cost.topology import GIB, Topology

KERNEL_SHARE = 0.5
"""The share of the peak that Pallas kernels are assumed to reach."""
LARGEST = 10
"""How many buffers a plan lists."""


def compiled(program: Program, topology: Topology, devices: Sequence[Any]) -> ProgramPlan:
    """Compiles a program and reads what the compiler says of it. Raises what the compiler raises, except for lack of memory."""
    began = time.perf_counter()
    lowered, executable, refusal = program.lower(), None, ""
    with tempfile.TemporaryDirectory(prefix="plan") as name:
        try:
            with not_cached():
                executable = lowered.compile(compiler_options={"xla_dump_to": name})
        except jax.errors.JaxRuntimeError as error:
            # A jaxlib may fail to load what a newer libtpu has compiled; the dump is complete all the same.
            refusal = "" if hlo.finished(Path(name)) else str(error)
            if refusal and not ("RESOURCE_EXHAUSTED" in refusal and "hbm" in refusal.lower()):
                raise
        seconds = time.perf_counter() - began
        where = [tuple(device.coords) for device in devices]
        reading = hlo.read(Path(name), program.activations, program.parameters, topology, where)
    notes = [reading.problem] if reading.problem else []
    needed, available, memory = _memory(reading, executable, refusal, topology, notes)
    fields = memory | _work(program, topology, reading, executable, refusal, notes) | ({"fits": False} if refusal else {})
    fields |= {"compile_seconds": round(seconds, 1), "notes": tuple(notes)}
    return ProgramPlan.of(program.name, program.tokens, program.flops, topology, needed, available, **fields)


@contextlib.contextmanager
def not_cached() -> Iterator[None]:
    """Keeps what is compiled inside out of the compilation cache: a program that comes from there leaves no dump."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": GIB, "T": 1 << 40}


def _memory(
    reading: hlo.Reading, executable: Any, refusal: str, topology: Topology, notes: list[str]
) -> tuple[float, float, dict[str, Any]]:
    """Bytes needed and available, as the compiler says if it refuses; and the plan's fields of memory."""
    size = r"([\d.]+)([KMGT]?)"
    stated = re.search(rf"(?:available HBM \(|of ){size}", refusal), re.search(rf"(?:temporaries \(|Used ){size}", refusal)
    available, asked = (float(match[1]) * _UNITS[match[2]] if match else 0.0 for match in stated)
    available = available or topology.chip.hbm
    if memory := reading.memory:
        fields = {"memory": memory.by_kind(), "largest": memory.buffers[:LARGEST]}
        return max(memory.total, asked), available, fields
    totals = executable.memory_analysis() if executable is not None else None
    if totals is not None:
        kinds = {
            "arguments": totals.argument_size_in_bytes,
            "results": totals.output_size_in_bytes - totals.alias_size_in_bytes,
            "temporaries": totals.temp_size_in_bytes,
        }
        notes.append("memory is the compiler's totals, without buffers")
        return sum(kinds.values()), available, {"memory": kinds}
    if not refusal:
        raise ValueError(f"the memory that the program needs is not known: {reading.problem}")
    notes.append(refusal.splitlines()[0])
    return asked, available, {}


def _work(
    program: Program, topology: Topology, reading: hlo.Reading, executable: Any, refusal: str, notes: list[str]
) -> dict[str, Any]:
    """The plan's fields of FLOPs, traffic, collectives and time."""
    chip, work, used = topology.chip, reading.work, reading.collectives or []
    tokens, flops = program.tokens / topology.count, program.flops.total / topology.count
    network = sum(collective.times * collective.seconds for collective in used)
    exposed = sum(collective.times * collective.seconds for collective in used if not collective.hidden)
    if work is None:
        analysis = executable.cost_analysis() if executable is not None else None
        if not analysis:
            return {}
        counted, traffic = float(analysis.get("flops", 0.0)), float(analysis.get("bytes accessed", 0.0))
        notes.append("FLOPs and traffic are the compiler's, which count a loop once; compute is at least FLOPs / peak")
        spent = Time.of(max(counted, flops) / chip.peak, traffic / chip.bandwidth, network, exposed, flops, tokens, chip)
        return {"hardware_flops": counted, "traffic_bytes": int(traffic), "collectives": _sums(used), "time": spent}
    if work.unknown_loops:
        notes.append(f"{work.unknown_loops} loops of unknown length were counted once")
    if work.kernels:
        kernels = ", ".join(f"{name} × {times:g}" for name, times in sorted(work.kernels.items()))
        notes.append(f"Pallas kernels ({kernels}) are assumed to reach {KERNEL_SHARE:.0%} of the peak")
    if work.unknown_kernels:
        notes.append(f"the FLOPs of {', '.join(sorted(work.unknown_kernels))} are unknown and left out")
    if not work.cycles:
        why = "the compiler stopped before it estimated cycles" if refusal else "the compiler's text gives no cycles"
        notes.append(f"{why}: compute is FLOPs / peak, a lower bound")
    compute = work.cycles / chip.clock if work.cycles else work.flops / chip.peak
    compute += work.kernel_flops / (KERNEL_SHARE * chip.peak)
    return {
        "hardware_flops": work.flops + work.kernel_flops,
        "kernel_flops": work.kernel_flops,
        "traffic_bytes": int(work.traffic),
        "collectives": _sums(used),
        "time": Time.of(compute, work.traffic / chip.bandwidth, network, exposed, flops, tokens, chip),
    }


def _sums(used: list[hlo.Collective]) -> tuple[CollectiveSum, ...]:
    kinds: dict[str, list[hlo.Collective]] = defaultdict(list)
    for collective in used:
        kinds[collective.kind].append(collective)
    return tuple(
        CollectiveSum(
            kind=kind,
            count=len(group),
            runs=sum(collective.times for collective in group),
            bytes=int(sum(collective.times * collective.bytes for collective in group)),
            seconds=sum(collective.times * collective.seconds for collective in group),
            overlapped_runs=sum(collective.times for collective in group if collective.hidden),
        )
        for kind, group in sorted(kinds.items())
    )
