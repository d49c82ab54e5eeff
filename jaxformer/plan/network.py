"""The collectives of a program: which, how often, how many bytes, how long at the speed of the links, and whether something is
computed meanwhile."""

import math
import re
from dataclasses import dataclass

from jaxformer.plan.count import flops
from jaxformer.plan.hlo import Computation, Instruction, Module
from jaxformer.plan.topology import Topology

AS_REDUCE = "all-gather as all-reduce"
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


@dataclass
class Collective:
    """One collective of the program."""

    kind: str
    times: float
    """How often it runs."""
    bytes: float
    """Of an all-gather what comes out, of all others what goes in; each time, on one device."""
    seconds: float
    """Each time, at the links' full speed: a lower bound."""
    hidden: bool
    """Whether matrix products run between its start and its end."""


def collectives(module: Module, topology: Topology, coordinates: list[tuple[int, ...]]) -> list[Collective]:
    """Those of a program. XLA writes one that runs beside others several times, at its start, beside each, and at its end: it
    is known by its channel, and counted once. coordinates: where each device stands in the torus."""
    found: dict[tuple[str, object, str], Collective] = {}
    for computation, index, times in module.visit():
        one = computation.instructions[index]
        for owner, part in _parts(module, computation, one):
            channel = part.number(r"channel_id=(\d+)")
            own = channel if channel is not None else f"{owner.name} {part.name}"
            hidden = _overlapped(module, computation, index)
            if owner is not computation:
                hidden = hidden or flops(module, computation, one) > 0
            for kind, size in _kinds(module, owner, part).items():
                key = (computation.name, own, kind)
                if key in found:
                    found[key].hidden |= hidden
                    continue
                seconds = _seconds(kind, size, _groups(part), topology, coordinates)
                found[key] = Collective(kind, times, size, seconds, hidden)
    return list(found.values())


def _parts(module: Module, computation: Computation, one: Instruction):
    """``(where it stands, collective)`` of an instruction, which may be a fusion."""
    if _base(one):
        yield computation, one
    elif one.op in ("fusion", "async-start") and (inner := module.inside(one)):
        for part in inner.instructions:
            yield from _parts(module, inner, part)


def _base(one: Instruction) -> str | None:
    base = one.op.removesuffix("-start")
    return base if base in KINDS else None


def _kinds(module: Module, owner: Computation, part: Instruction) -> dict[str, float]:
    """Bytes by kind. An all-reduce of which each device then keeps its own part is a reduce-scatter; one of zeros into which
    each device has written its own part is an all-gather that XLA has made an all-reduce of, at twice the traffic."""
    base = _base(part) or ""
    if base == "all-gather":
        shapes = part.shapes[len(part.shapes) // 2 :] if part.op.endswith("-start") else part.shapes
        return {base: sum(shape.bytes for shape in shapes)}
    sizes: dict[str, float] = {}
    for operand in (owner.by_name[name] for name in part.operands if name in owner.by_name):
        kind = base
        if base == "all-reduce" and owner.name.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"
        elif base == "all-reduce" and _is_padded(module, owner, operand):
            kind = AS_REDUCE
        sizes[kind] = sizes.get(kind, 0) + sum(shape.bytes for shape in operand.shapes)
    return sizes


def _is_padded(module: Module, owner: Computation, one: Instruction) -> bool:
    """Whether this is what a device holds of a whole, amid zeros."""
    for _ in range(8):
        if inner := module.inside(one) if one.op == "fusion" else None:
            owner, one = inner, inner.root
        elif one.op in _PASSED and one.operands[0] in owner.by_name:
            one = owner.by_name[one.operands[0]]
    return one.op == "dynamic-update-slice"


_PASSED = ("copy", "bitcast", "convert", "copy-done", "copy-start", "reshape", "transpose")


def _overlapped(module: Module, computation: Computation, index: int) -> bool:
    one = computation.instructions[index]
    if not one.op.endswith("-start"):
        return False
    running = {one.name}
    for later in computation.instructions[index + 1 :]:
        if running.intersection(later.operands):
            if later.op.endswith("-done"):
                return False
            if later.op.endswith("-update"):
                running.add(later.name)
        if flops(module, computation, later) > 0:
            return True
    return False


def _seconds(kind, size, groups, topology: Topology, coordinates) -> float:
    members = groups[0] if groups else list(range(topology.count))
    if len(members) < 2:
        return 0.0
    share = (len(members) - 1) / len(members)
    wire = {
        "all-reduce": 2 * size * share,
        AS_REDUCE: 2 * size * share,
        "collective-permute": size,
        "collective-broadcast": size,
    }.get(kind, size * share)
    if kind == "collective-permute":
        return wire / topology.chip.link
    return wire / _bandwidth(members, topology, coordinates)


def _bandwidth(members: list[int], topology: Topology, coordinates) -> float:
    """Bytes/s into one chip, over the links along all axes of the torus that the group spreads over: two an axis, one where
    the axis has two chips."""
    links = 0
    for axis, side in enumerate(topology.shape):
        if len({coordinates[member][axis] for member in members if member < len(coordinates)}) > 1:
            links += 1 if side == 2 else 2
    return topology.chip.link * max(links, 1)


def _groups(part: Instruction) -> list[list[int]] | None:
    """The replica groups, or the pairs of a permutation; None where all devices take part, or it is not understood."""
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", part.text):
        return [[int(a), int(b)] for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1])]
    if listed := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)+)\}", part.text):
        return [[int(n) for n in group.split(",") if n] for group in re.findall(r"\{([\d,]*)\}", listed[1])]
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", part.text):
        sides = [int(n) for n in iota[3].split(",")]
        order = [int(n) for n in iota[4].split(",")] if iota[4] else list(range(len(sides)))
        flat = _transposed(sides, order)
        return [flat[start : start + int(iota[2])] for start in range(0, len(flat), int(iota[2]))]
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", part.text):
        axes = [(name, int(size)) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])]
        chosen = set(re.findall(r"'([^']*)'", mesh[2]))
        inner = [at for at, (name, _) in enumerate(axes) if name in chosen]
        outer = [at for at in range(len(axes)) if at not in inner]
        flat = _transposed([size for _, size in axes], outer + inner)
        size = math.prod(axes[at][1] for at in inner)
        return [flat[start : start + size] for start in range(0, len(flat), size)]
    return None


def _transposed(sides: list[int], order: list[int]) -> list[int]:
    """``arange(prod(sides)).reshape(sides).transpose(order)``, flat."""
    strides = [math.prod(sides[at + 1 :]) for at in range(len(sides))]
    flat = [0]
    for axis in order:
        flat = [base + n * strides[axis] for base in flat for n in range(sides[axis])]
    return flat
