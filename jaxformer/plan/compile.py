"""Compiling for chips that are not there, and what the compiler's program then tells."""

import contextlib
import re
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxformer.plan import count, hlo, memory, network
from jaxformer.plan.programs import Program
from jaxformer.plan.record import Buffered, CollectiveSum, ProgramPlan, Time
from jaxformer.plan.topology import GIB, Topology

KERNEL_SHARE = 0.5
"""Share of the peak that Pallas kernels are assumed to reach."""
LARGEST = 10


def compiled(program: Program, topology: Topology, devices: Sequence[Any]) -> ProgramPlan:
    """Compiles a program, and reads what came of it. Raises what the compiler raises, but for want of memory."""
    began = time.perf_counter()
    lowered = program.lower()
    with tempfile.TemporaryDirectory(prefix="plan") as name:
        folder, refusal = Path(name), ""
        try:
            with not_cached():
                lowered.compile(compiler_options={"xla_dump_to": name})
        except jax.errors.JaxRuntimeError as error:
            # Where a jaxlib cannot read what a newer libtpu has compiled, the dump is whole all the same.
            refusal = "" if _dumped(folder, "after_codegen") else str(error)
            if refusal and not ("RESOURCE_EXHAUSTED" in refusal and "hbm" in refusal.lower()):
                raise
        seconds = time.perf_counter() - began
        assigned, final = (_dumped(folder, stage) for stage in ("after_optimizations", "after_codegen"))
        found = memory.load(folder, hlo.read(assigned), program.named, program.whole) if assigned else None
    if found is None:
        if not refusal:
            raise ValueError("this libtpu does not write what it compiles: another version is needed")
        return _refused(program, topology, refusal, seconds)
    return _plan(program, topology, devices, hlo.read(final or assigned), found, refusal, seconds)


def _dumped(folder: Path, stage: str) -> str:
    """XLA's text of a program at a stage; empty where there is none."""
    found = next(iter(folder.glob(f"*.{stage}.txt")), None)
    return found.read_text() if found else ""


@contextlib.contextmanager
def not_cached() -> Iterator[None]:
    """What is compiled inside does not go to the compilation cache: what comes from there leaves no dump."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


def _plan(program, topology: Topology, devices, module: hlo.Module, found: memory.Memory, refusal: str, seconds) -> ProgramPlan:
    work = count.count(module)
    where = [tuple(device.coords) for device in devices]
    used = network.collectives(module, topology, where)
    needed, available = _numbers(refusal, found.total, topology)
    notes = [f"{len(work.unknown_loops)} loops of unknown length were counted once"] if work.unknown_loops else []
    if work.kernels:
        kernels = ", ".join(f"{name} × {times:g}" for name, times in sorted(work.kernels.items()))
        notes.append(f"Pallas kernels ({kernels}) are assumed to reach {KERNEL_SHARE:.0%} of the peak")
    if work.unknown_kernels:
        notes.append(f"the FLOPs of {', '.join(sorted(work.unknown_kernels))} are not known, and left out")
    if refusal and not work.cycles:
        notes.append("the compiler stopped before it estimated cycles: compute is FLOPs / peak, a lower bound")
    return ProgramPlan(
        name=program.name,
        fits=not refusal and needed <= available,
        needed_bytes=int(needed),
        available_bytes=int(available),
        memory={kind: int(size) for kind, size in found.by_kind().items()},
        largest=tuple(Buffered(b.bytes, b.kind, b.name, b.shape) for b in found.buffers[:LARGEST]),
        tokens=program.tokens,
        model_flops=program.flops.total / topology.count,
        attention_flops=program.flops.attention / topology.count,
        hardware_flops=work.flops + work.kernel_flops,
        kernel_flops=work.kernel_flops,
        traffic_bytes=int(work.traffic),
        collectives=_sums(used),
        time=_time(program, topology, work, used),
        compile_seconds=round(seconds, 1),
        host_bytes=host_bytes(),
        notes=tuple(notes),
    )


def _refused(program: Program, topology: Topology, refusal: str, seconds: float) -> ProgramPlan:
    """All that can be said where the compiler gave up early."""
    needed, available = _numbers(refusal, 0, topology)
    flops = program.flops.total / topology.count
    nothing = Time(flops / topology.chip.peak, 0, 0, 0, flops / topology.chip.peak, "compute", 0, 0, 0)
    return ProgramPlan(
        name=program.name,
        fits=False,
        needed_bytes=int(needed),
        available_bytes=int(available),
        memory={},
        largest=(),
        tokens=program.tokens,
        model_flops=flops,
        attention_flops=program.flops.attention / topology.count,
        hardware_flops=0.0,
        kernel_flops=0.0,
        traffic_bytes=0,
        collectives=(),
        time=nothing,
        compile_seconds=round(seconds, 1),
        host_bytes=host_bytes(),
        notes=(refusal.splitlines()[0],),
    )


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": GIB, "T": 1 << 40}


def _numbers(refusal: str, total: float, topology: Topology) -> tuple[float, float]:
    """Bytes needed and available, as the compiler says where it refuses."""
    size = r"([\d.]+)([KMGT]?)"
    to_bytes = lambda found: float(found[0]) * _UNITS[found[1]]
    available = re.search(rf"(?:available HBM \(|of ){size}", refusal)
    asked = re.search(rf"(?:temporaries \(|Used ){size}", refusal)
    needed = max(total, to_bytes(asked.groups()) if asked else 0)
    return needed, to_bytes(available.groups()) if available else topology.chip.hbm


def _sums(used: list[network.Collective]) -> tuple[CollectiveSum, ...]:
    kinds: dict[str, list[network.Collective]] = defaultdict(list)
    for one in used:
        kinds[one.kind].append(one)
    return tuple(
        CollectiveSum(
            kind=kind,
            count=len(ones),
            runs=sum(one.times for one in ones),
            bytes=int(sum(one.times * one.bytes for one in ones)),
            seconds=sum(one.times * one.seconds for one in ones),
            overlapped_runs=sum(one.times for one in ones if one.hidden),
        )
        for kind, ones in sorted(kinds.items())
    )


def _time(program: Program, topology: Topology, work: count.Work, used: list[network.Collective]) -> Time:
    chip = topology.chip
    compute = work.cycles / chip.clock if work.cycles else work.flops / chip.peak
    compute += work.kernel_flops / (KERNEL_SHARE * chip.peak)
    links = sum(one.times * one.seconds for one in used)
    exposed = sum(one.times * one.seconds for one in used if not one.hidden)
    return estimate(compute, work.traffic / chip.bandwidth, links, exposed, program.flops.total, program.tokens, topology)


def estimate(
    compute: float, traffic: float, links: float, exposed: float, flops: float, tokens: int, topology: Topology
) -> Time:
    """The time of a run, of its parts: the slowest of them, and what of the network nothing runs beside."""
    slowest = {"compute": compute, "memory": traffic, "network": links}
    seconds = max(max(compute, traffic) + exposed, links)
    peak = topology.chip.peak * topology.count
    return Time(
        compute=compute,
        memory=traffic,
        network=links,
        exposed_network=exposed,
        estimate=seconds,
        bound=max(slowest, key=lambda name: slowest[name]),
        mfu=flops / peak / seconds if seconds else 0.0,
        compute_mfu=flops / peak / compute if compute else 0.0,
        tokens_per_second_per_chip=tokens / topology.count / seconds if seconds else 0.0,
    )


def host_bytes() -> int:
    """The most memory that this process has held."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
