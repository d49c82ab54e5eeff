"""The collectives of a program: how often each runs, its bytes, its time at the speed of the links, and whether anything is
computed meanwhile."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxformer.cost.hlo.hlo_cost import flops
from jaxformer.cost.hlo.text import Instruction, Module
from jaxformer.cost.topology import Topology

AS_REDUCE = "all-gather as all-reduce"
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


@dataclass
class Collective:
    """One collective of the program, on one device; bytes and seconds are those of one run."""

    kind: str
    times: float
    """How often it runs."""
    bytes: float
    """The result of an all-gather, the operand of every other kind."""
    seconds: float
    """At the full speed of the links: a lower bound."""
    hidden: bool
    """Whether matrix products run between its start and its end."""


def find_collectives(module: Module, topology: Topology, coordinates: list[tuple[int, ...]]) -> list[Collective]:
    """The collectives of a program. One that runs beside other instructions is written several times: at its start, beside
    each of them and at its end. Its channel identifies it, and it counts once. coordinates: each device's in the torus."""
    by_channel: dict[tuple[str, object, str], Collective] = {}
    for instruction, times in module.executed():
        for collective in _parts(instruction):
            channel = collective.number(r"channel_id=(\d+)")
            identity = channel if channel is not None else f"{collective.computation.name} {collective.name}"
            hidden = _overlapped(instruction) or (collective is not instruction and flops(instruction) > 0)
            for kind, size in _kinds(collective).items():
                key = (instruction.computation.name, identity, kind)
                if key in by_channel:
                    by_channel[key].hidden |= hidden
                    continue
                seconds = _seconds(kind, size, _groups(collective), topology, coordinates)
                by_channel[key] = Collective(kind, times, size, seconds, hidden)
    return list(by_channel.values())


def _parts(instruction: Instruction) -> Iterator[Instruction]:
    """The collectives of an instruction, which may be a fusion."""
    if _base(instruction):
        yield instruction
    elif instruction.inner:
        for collective in instruction.inner.instructions:
            yield from _parts(collective)


def _base(instruction: Instruction) -> str | None:
    base = instruction.op.removesuffix("-start")
    return base if base in KINDS else None


def _kinds(collective: Instruction) -> dict[str, float]:
    """Bytes by kind. An all-reduce whose result each device then slices is a reduce-scatter; one of zeros into which each
    device has written its slice is an all-gather that XLA has turned into an all-reduce, at twice the traffic."""
    base = _base(collective) or ""
    if base == "all-gather":
        shapes = collective.shapes[len(collective.shapes) // 2 :] if collective.op.endswith("-start") else collective.shapes
        return {base: sum(shape.bytes for shape in shapes)}
    sizes: dict[str, float] = {}
    for operand in filter(lambda operand: operand.shapes, collective.inputs):
        kind = base
        if base == "all-reduce" and collective.computation.name.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"
        elif base == "all-reduce" and _is_padded(operand):
            kind = AS_REDUCE
        sizes[kind] = sizes.get(kind, 0) + sum(shape.bytes for shape in operand.shapes)
    return sizes


def _is_padded(instruction: Instruction) -> bool:
    """Whether this is a device's slice of an array amid zeros."""
    for _ in range(8):
        if instruction.op == "fusion" and instruction.inner:
            instruction = instruction.inner.root
        elif instruction.op in _MOVES and instruction.inputs[0].shapes:
            instruction = instruction.inputs[0]
    return instruction.op == "dynamic-update-slice"


_MOVES = ("copy", "bitcast", "convert", "copy-done", "copy-start", "reshape", "transpose")


def _overlapped(instruction: Instruction) -> bool:
    if not instruction.op.endswith("-start"):
        return False
    instructions, running = instruction.computation.instructions, {instruction.name}
    for later in instructions[instructions.index(instruction) + 1 :]:
        if running.intersection(later.operands):
            if later.op.endswith("-done"):
                return False
            if later.op.endswith("-update"):
                running.add(later.name)
        if flops(later) > 0:
            return True
    return False


def _seconds(kind: str, size: float, groups: list[list[int]] | None, topology: Topology, coordinates) -> float:
    members = groups[0] if groups else list(range(topology.count))
    if len(members) < 2:
        return 0.0
    if kind == "collective-permute":
        return size / topology.chip.link
    share = 1.0 if kind == "collective-broadcast" else (len(members) - 1) / len(members)
    passes = 2 if kind in ("all-reduce", AS_REDUCE) else 1
    # All links along the axes of the torus that the group spans carry it: two per axis, one where the axis has two chips.
    links = 0
    for axis, side in enumerate(topology.shape):
        if len({coordinates[member][axis] for member in members if member < len(coordinates)}) > 1:
            links += 1 if side == 2 else 2
    return passes * size * share / (topology.chip.link * max(links, 1))


def _groups(collective: Instruction) -> list[list[int]] | None:
    """The replica groups, or the pairs of a permutation; None if all devices take part. Raises ValueError for other groups."""
    numbers = lambda text: [int(n) for n in re.findall(r"\d+", text)]
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)+)\}", collective.text):
        return [numbers(group) for group in re.findall(r"\{([\d,]*)\}", listed[1])]
    if iota := re.search(rf"replica_groups=\[\d+,(\d+)\]<={_IOTA}", collective.text):
        return _iota(iota[2], iota[3]).reshape(-1, int(iota[1])).tolist()
    if mesh := re.search(rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_IOTA}\))?\s*\{{([^}}]*)\}}", collective.text):
        sides = dict(re.findall(r"'([^']*)'=(\d+)", mesh[1]))
        chosen = [name in mesh[4] for name in (f"'{name}'" for name in sides)]
        devices = _iota(mesh[2] or ",".join(sides.values()), mesh[3]).reshape([int(side) for side in sides.values()])
        order = sorted(range(len(sides)), key=lambda axis: chosen[axis])  # a group runs over the chosen axes
        width = math.prod(int(side) for side, is_chosen in zip(sides.values(), chosen, strict=True) if is_chosen)
        return devices.transpose(order).reshape(-1, width).tolist()
    if other := re.search(r"replica_groups=(?!\{\}).{0,80}", collective.text):
        raise ValueError(f"the devices of {collective.name}, {other[0]}")
    return None


_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


def _iota(sides: str, order: str | None) -> np.ndarray:
    """XLA's ``[2,4]T(1,0)``: the numbers of all devices, in an array of those sides with its axes transposed."""
    shape = [int(side) for side in sides.split(",")]
    axes = [int(n) for n in order.split(",")] if order else range(len(shape))
    return np.arange(math.prod(shape)).reshape(shape).transpose(axes)
