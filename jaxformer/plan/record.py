"""What a plan says: the records that are printed and written as JSON."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

VERSION = 1
"""Of the JSON; a field that goes or changes its meaning raises it."""


@dataclass(frozen=True)
class Buffered:
    """One of the largest buffers of a device."""

    bytes: int
    kind: str
    name: str
    shape: str


@dataclass(frozen=True)
class CollectiveSum:
    """All collectives of a kind, on one device."""

    kind: str
    count: int
    """In the program."""
    runs: float
    """Count × how often the loops around them run."""
    bytes: int
    """Of all runs."""
    seconds: float
    """Of all runs, at the links' full speed."""
    overlapped_runs: float
    """Runs with matrix products between start and end."""


@dataclass(frozen=True)
class Time:
    """Seconds of one run: estimates all of them, no measurement."""

    compute: float
    """Cycles as the compiler estimates them / clock, and Pallas kernels; by arithmetic FLOPs / peak."""
    memory: float
    """Traffic / bandwidth of the memory."""
    network: float
    """Collectives / bandwidth of the links."""
    exposed_network: float
    """Those that nothing runs beside."""
    estimate: float
    """The slower of compute and memory, and the exposed network after it; no less than the network."""
    bound: str
    mfu: float
    """Model FLOPs / (estimate × peak)."""
    compute_mfu: float
    """Model FLOPs / (compute × peak)."""
    tokens_per_second_per_chip: float


@dataclass(frozen=True)
class ProgramPlan:
    """One program on one device, unless said otherwise."""

    name: str
    fits: bool
    needed_bytes: int
    available_bytes: int
    memory: dict[str, int]
    """Bytes by kind, when most is needed."""
    largest: tuple[Buffered, ...]
    tokens: int
    """Over all devices."""
    model_flops: float
    attention_flops: float
    """Of those, attention's."""
    hardware_flops: float
    kernel_flops: float
    """Of those, Pallas kernels'."""
    traffic_bytes: int
    collectives: tuple[CollectiveSum, ...]
    time: Time
    compile_seconds: float
    host_bytes: int
    """The most memory that compiling has taken on this machine."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Trial:
    """A change that was tried because the plan did not fit."""

    change: str
    flags: tuple[str, ...]
    """Of the command line."""
    fits: bool
    needed_bytes: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """All of it."""

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


def to_json(plan: Plan) -> str:
    """The plan as JSON."""
    return json.dumps(dataclasses.asdict(plan) | {"fits": plan.fits}, indent=2)


def from_json(text: str) -> Plan:
    """The plan that ``to_json`` wrote. Raises ValueError for another version."""
    values: dict[str, Any] = json.loads(text)
    if values.get("version") != VERSION:
        raise ValueError(f"a plan of version {values.get('version')}, not {VERSION}")
    values.pop("fits")

    def program(one: dict[str, Any]) -> ProgramPlan:
        inner = {
            "largest": tuple(Buffered(**buffer) for buffer in one["largest"]),
            "collectives": tuple(CollectiveSum(**each) for each in one["collectives"]),
            "time": Time(**one["time"]),
            "notes": tuple(one["notes"]),
        }
        return ProgramPlan(**{**one, **inner})

    values["programs"] = tuple(map(program, values["programs"]))
    values["trials"] = tuple(Trial(**{**trial, "flags": tuple(trial["flags"])}) for trial in values["trials"])
    values["stated"] = tuple(values["stated"])
    return Plan(**values)
