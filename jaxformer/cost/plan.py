"""A plan: what each program of a run would need and take, and the report of it."""

import dataclasses
import resource
import sys
from dataclasses import dataclass, field
from typing import Any

from jaxformer.cost.model_flops import ModelFlops
from jaxformer.cost.table import Report, Table
from jaxformer.cost.topology import GIB, Topology

VERSION = 1
"""The version of the JSON: it increases when a field goes or changes its meaning."""
KINDS = ("parameters", "optimizer", "cache", "batch", "gradients", "activations", "parameter copies", "temporaries")
"""Kinds of buffers. activations: computed in the forward pass and needed in the backward pass; parameter copies: the same, of
a parameter's shape, which are parameters cast or gathered; gradients: computed later, of a parameter's shape; temporaries: all
others."""


def host_bytes() -> int:
    """The most memory that this process has held, in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


@dataclass(frozen=True)
class Buffer:
    """One of the largest buffers of a device."""

    bytes: int
    kind: str
    name: str
    shape: str


@dataclass(frozen=True)
class CollectiveSum:
    """All collectives of one kind, on one device."""

    kind: str
    count: int
    """How many the program has."""
    runs: float
    """How often they run, each as often as the loops around it."""
    bytes: int
    """All runs together."""
    seconds: float
    """All runs together, at the full speed of the links."""
    overlapped_runs: float
    """Runs with matrix products between their start and their end."""


@dataclass(frozen=True)
class Time:
    """Seconds of one run. All are estimates; nothing is measured."""

    compute: float = 0.0
    """The compiler's estimate of cycles / clock, plus Pallas kernels; computed plans: FLOPs / peak."""
    memory: float = 0.0
    """Traffic / memory bandwidth."""
    network: float = 0.0
    """Collectives / link bandwidth."""
    exposed_network: float = 0.0
    """The collectives that run beside nothing."""
    estimate: float = 0.0
    """The slower of compute and memory, plus the exposed network; at least the network."""
    bound: str = "compute"
    mfu: float = 0.0
    """Model FLOPs / (estimate × peak)."""
    compute_mfu: float = 0.0
    """Model FLOPs / (compute × peak)."""
    tokens_per_second_per_chip: float = 0.0

    @classmethod
    def of(cls, compute: float, memory: float, network: float, exposed: float, flops: float, tokens: float, chip) -> "Time":
        """The time of a run from its parts. flops, tokens: the model's, per chip."""
        slowest = {"compute": compute, "memory": memory, "network": network}
        seconds = max(max(compute, memory) + exposed, network)
        per = lambda amount, seconds: amount / seconds if seconds else 0.0
        bound = max(slowest, key=lambda name: slowest[name])
        rates = per(flops / chip.peak, seconds), per(flops / chip.peak, compute), per(tokens, seconds)
        return cls(compute, memory, network, exposed, seconds, bound, *rates)


@dataclass(frozen=True, kw_only=True)
class ProgramPlan:
    """One program. All values are per device unless they say otherwise."""

    name: str
    fits: bool
    needed_bytes: int
    available_bytes: int
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes by kind, when the program needs the most memory."""
    largest: tuple[Buffer, ...] = ()
    tokens: int
    """Over all devices."""
    model_flops: float
    attention_flops: float
    """The part of the model's FLOPs that is attention's."""
    hardware_flops: float = 0.0
    kernel_flops: float = 0.0
    """The part of the hardware's FLOPs in Pallas kernels."""
    traffic_bytes: int = 0
    collectives: tuple[CollectiveSum, ...] = ()
    time: Time = Time()
    compile_seconds: float = 0.0
    host_bytes: int = field(default_factory=host_bytes)
    """The most memory that this process has held so far."""
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, name: str, tokens: int, flops: ModelFlops, topology: Topology, needed: float, available: float, **fields: Any
    ) -> "ProgramPlan":
        """A plan of a program of so many tokens and model FLOPs, over all devices; it fits if less is needed than available."""
        fields = {"fits": needed <= available, "needed_bytes": int(needed), "available_bytes": int(available)} | fields
        fields |= {"model_flops": flops.total / topology.count, "attention_flops": flops.attention / topology.count}
        return cls(name=name, tokens=tokens, **fields)

    @property
    def verdict(self) -> str:
        """Whether it fits, and by how much, in one line."""
        verdict = "fits" if self.fits else "does not fit"
        return f"{self.name}: {verdict}, {_gib(self.needed_bytes)} of {_gib(self.available_bytes)} GiB per device"


@dataclass(frozen=True)
class Trial:
    """A change that was tried because the plan did not fit."""

    change: str
    flags: tuple[str, ...]
    """The change on the command line."""
    fits: bool
    needed_bytes: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """The plan of a run on one topology."""

    config: str
    topology: str
    chip: str
    devices: int
    mesh: dict[str, int]
    by: str
    """compiler, or arithmetic: then nothing was compiled."""
    parameters: int
    stated: tuple[str, ...]
    """What was assumed."""
    programs: tuple[ProgramPlan, ...]
    trials: tuple[Trial, ...] = ()
    version: int = VERSION

    @property
    def fits(self) -> bool:
        return all(program.fits for program in self.programs)

    def values(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return dataclasses.asdict(self) | {"fits": self.fits}

    def report(self) -> Report:
        """The plan as text and tables."""
        axes = " · ".join(f"{name} {size}" for name, size in self.mesh.items() if size > 1) or "no axis of the mesh"
        on = f"{self.devices} × {self.chip} ({self.topology})"
        report: Report = [f"{self.config}, {self.parameters:,} parameters, on {on}: {axes}"]
        report.append("\n".join(f"- {line}" for line in self.stated))
        for program in self.programs:
            report += _program(program, compiled=self.by == "compiler")
        if self.trials:
            columns = ("tried", "", "GiB per device", "s")
            verdict = {True: "fits", False: "does not fit"}
            rows = [(" ".join(t.flags), verdict[t.fits], _gib(t.needed_bytes), f"{t.seconds:.0f}") for t in self.trials]
            fitting = next((" ".join(trial.flags) for trial in self.trials if trial.fits), "")
            report += [Table(columns, rows), f"smallest change that fits: {fitting}" if fitting else "none of these fits"]
        return report


def _program(program: ProgramPlan, compiled: bool) -> Report:
    report: Report = [f"{program.verdict}; {_speed(program, compiled)}"]
    if kinds := [(kind, _gib(size)) for kind, size in program.memory.items() if size]:
        report.append(Table(("memory per device at the peak", "GiB"), [*kinds, ("total", _gib(program.needed_bytes))]))
    if compiled and program.largest:
        rows = [(b.name, b.kind, b.shape, f"{b.bytes / 2**20:,.1f}") for b in program.largest]
        report.append(Table(("largest buffers", "kind", "shape", "MiB"), rows))
    if program.hardware_flops:
        report.append(Table(("one run, per device", "", ""), _work(program)))
    if program.collectives:
        columns = ("collectives", "in the program", "runs", "GB", "s", "beside products")
        sums = [
            (
                f"{c.count}",
                f"{c.runs:,.0f}",
                f"{c.bytes / 1e9:,.3g}",
                f"{c.seconds:.3g}",
                f"{c.overlapped_runs:,.0f}" * compiled,
            )
            for c in program.collectives
        ]
        report.append(Table(columns, [(c.kind, *cells) for c, cells in zip(program.collectives, sums, strict=True)]))
    if compiled:
        report.append(
            f"compiled in {program.compile_seconds:.0f} s with {program.host_bytes / GIB:.2g} GiB of this machine's memory"
        )
    return report + [f"note: {note}" for note in program.notes]


def _speed(program: ProgramPlan, compiled: bool) -> str:
    time = program.time
    if not program.fits or not time.estimate:
        return "no time is estimated for what does not run"
    said, caveat = ("estimated", "an estimate") if compiled else ("at best", "a bound")
    rates = f"MFU {time.mfu:.1%}, {time.tokens_per_second_per_chip:,.0f} tokens/s per chip"
    return f"{said} {time.estimate:.4g} s, bound by {time.bound}, {rates} ({caveat}, not a measurement)"


def _work(program: ProgramPlan) -> list[tuple[str, ...]]:
    time, tera = program.time, lambda flops, digits: f"{flops / 1e12:,.{digits}g} T"
    share = f"{program.hardware_flops / program.model_flops:.2f} × the model's" if program.model_flops else ""
    return [
        ("model FLOPs", tera(program.model_flops, 4), f"{tera(program.attention_flops, 3)} of them attention"),
        ("FLOPs of the program", tera(program.hardware_flops, 4), share),
        ("memory traffic", f"{program.traffic_bytes / 1e9:,.4g} GB", ""),
        ("compute", f"{time.compute:.4g} s", f"MFU {time.compute_mfu:.1%} if nothing else took time"),
        ("memory", f"{time.memory:.4g} s", ""),
        ("network", f"{time.network:.4g} s", f"{time.exposed_network:.4g} s of it not overlapped"),
    ]


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}"
