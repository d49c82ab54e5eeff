"""Which buffers live when a program needs the most memory, by the texts that XLA dumps besides the program: where in memory
each of its values lies, and from when to when each is needed."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxformer.cost.hlo.buffer_names import Dims, Names, Span, Value
from jaxformer.cost.hlo.text import Module
from jaxformer.cost.plan import KINDS, Buffer


@dataclass(frozen=True)
class Memory:
    """The memory of one device, in bytes."""

    total: int
    """What the program needs: arguments, results that do not take an argument's place, and the arena of everything else."""
    buffers: tuple[Buffer, ...]
    """Those alive when the arena is fullest, the largest first."""
    gaps: int
    """The part of the arena that is empty at that time: between buffers, or needed at another time by its layout."""

    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind, and of the gaps."""
        sums = {kind: sum(buffer.bytes for buffer in self.buffers if buffer.kind == kind) for kind in KINDS}
        return sums | {"gaps": self.gaps}


@dataclass
class _Allocation:
    size: int
    attributes: str
    values: list[Value] = field(default_factory=list)


_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*)")
_VALUE = re.compile(r"^ value: <\d+ (\S+?)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)")
_RANGE = re.compile(r"^\s+(\S+?):(\d+)-(\d+)\s*$")
_STEP = re.compile(r"^\s+(\d+):(\S+)\s*$")


def read_buffers(
    assignment: str, ranges: str, module: Module, activations: Dims | None = None, parameters: Dims | None = None
) -> Memory:
    """The memory of a program, by XLA's texts ``buffer-assignment`` and ``live-range``. activations: the named ones, with the
    dimensions that one device holds of them; parameters: with all their dimensions. Raises ValueError for a text in which
    nothing is allocated or no value lives."""
    allocations = [a for a in _allocations(assignment) if not re.search(r"\bcolor [1-9]|thread-local", a.attributes)]
    spans, order = _spans(ranges)
    if not sum(a.size for a in allocations) or not spans or not any(a.values for a in allocations):
        raise ValueError("it lists no allocations" if spans else "it lists no live ranges")
    names = Names(module, activations or {}, parameters or {})
    backward = min((at for at, name in order.items() if names.is_backward_product(name)), default=None)
    buffers, gaps = [], 0
    # Arguments first: they add to the shapes by which a parameter's copies and gradients are recognized.
    for allocation in sorted(allocations, key=lambda a: "parameter" not in a.attributes):
        if re.search(r"parameter \d+", allocation.attributes):
            buffers.append(names.argument(allocation.size, allocation.values))
        elif "constant" in allocation.attributes:
            buffers.append(
                Buffer(allocation.size, "temporaries", "constant", allocation.values[0].shape if allocation.values else "")
            )
        else:
            alive, gap = _fullest(allocation, spans)
            gaps += gap
            buffers += [names.temporary(values, spans, backward) for values in alive]
    buffers.sort(key=lambda buffer: -buffer.bytes)
    return Memory(sum(a.size for a in allocations), tuple(buffers), gaps)


def _allocations(text: str) -> list[_Allocation]:
    allocations: list[_Allocation] = []
    for line in text.splitlines():
        if head := _ALLOCATION.match(line):
            allocations.append(_Allocation(int(head[1]), head[2]))
        elif allocations and (value := _VALUE.match(line)) and not value[1].endswith("{}"):  # {}: the index of a tuple
            allocations[-1].values.append(Value(value[1], int(value[2]), int(value[3]), value[4]))
    return allocations


def _spans(text: str) -> tuple[dict[str, Span], dict[int, str]]:
    """From when to when each value is needed, and which instruction runs at each time."""
    spans, order = {}, {}
    for line in text.splitlines():
        if span := _RANGE.match(line):
            spans[span[1].removesuffix("{}")] = int(span[2]), int(span[3])
        elif step := _STEP.match(line):
            order[int(step[1])] = step[2]
    return spans, order


def _fullest(arena: _Allocation, spans: dict[str, Span]) -> tuple[list[list[Value]], int]:
    """The buffers of an arena when most of it is in use, each as the values that share it, and the bytes that are empty."""
    timed = sorted((value for value in arena.values if value.name in spans and value.size), key=lambda v: spans[v.name][0])
    if not timed:
        return ([arena.values], arena.size - arena.values[0].size) if arena.values else ([], arena.size)
    most, now, alive = -1, 0, list[Value]()
    for at, value in enumerate(timed):
        alive.append(value)
        start = spans[value.name][0]
        if at + 1 < len(timed) and spans[timed[at + 1].name][0] == start:
            continue
        alive = [other for other in alive if spans[other.name][1] >= start]
        if sum(other.size for other in alive) > most:  # only then can they cover more
            used = _union((other.offset, other.offset + other.size) for other in alive)
            most, now = max((most, now), (used, start), key=lambda moment: moment[0])
    regions = {(v.offset, v.size) for v in timed if spans[v.name][0] <= now <= spans[v.name][1]}
    kept: list[list[Value]] = []
    covered: list[tuple[int, int]] = []
    for offset, size in sorted(regions, key=lambda region: -region[1]):
        before = _union(covered)
        covered.append((offset, offset + size))
        if _union(covered) > before:  # a value inside the memory of another is no buffer of its own
            sharing = [value for value in timed if (value.offset, value.size) == (offset, size)]
            kept.append(_chain(sharing, spans, now))
    return kept, arena.size - most


def _chain(sharing: list[Value], spans: dict[str, Span], now: int) -> list[Value]:
    """Of the values in one place, those that pass it on to one another until and after ``now``: through a loop, say."""
    first = last = now
    chain: list[Value] = []
    near = lambda value: spans[value.name][0] <= last + 1 and spans[value.name][1] >= first - 1
    while reached := list(filter(near, sharing)):
        sharing = [value for value in sharing if not near(value)]
        chain += reached
        first = min(first, *(spans[value.name][0] for value in reached))
        last = max(last, *(spans[value.name][1] for value in reached))
    return chain


def _union(pieces: Iterable[tuple[int, int]]) -> int:
    total, reached = 0, -1
    for start, end in sorted(pieces):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total
