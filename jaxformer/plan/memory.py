"""Which buffers live when a program needs the most memory: from what XLA's buffer assignment says of itself.

XLA writes three texts of a program when it is asked to dump: the program, where in memory each of its values lies, and from
when to when each is needed.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jaxformer.plan.hlo import Module
from jaxformer.plan.names import KINDS, Dims, Names, Value
from jaxformer.plan.record import Buffered


@dataclass(frozen=True)
class Memory:
    """Of one device, in bytes."""

    total: int
    """What the program needs: arguments, results that take no argument's place, and the arena of all else."""
    buffers: tuple[Buffered, ...]
    """Those alive when the arena is fullest, the largest first."""
    gaps: int
    """What of the arena is empty at that time: between buffers, or needed at another time by its layout."""

    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind, and of the gaps."""
        sums = Counter({kind: 0 for kind in KINDS})
        for buffer in self.buffers:
            sums[buffer.kind] += buffer.bytes
        return dict(sums) | {"gaps": self.gaps}


@dataclass
class _Allocation:
    size: int
    text: str
    values: list[Value]


_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*)")
_VALUE = re.compile(r"^ value: <\d+ (\S+?)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)")
_RANGE = re.compile(r"^\s+(\S+?):(\d+)-(\d+)\s*$")
_STEP = re.compile(r"^\s+(\d+):(\S+)\s*$")


def read(assignment: str, ranges: str, module: Module, named: Dims | None = None, whole: Dims | None = None) -> Memory:
    """Memory of a program, of XLA's texts ``buffer-assignment`` and ``live-range``. named: activations by name, with the
    dimensions that one device holds of them; whole: parameters, with all of theirs."""
    allocations = [a for a in _allocations(assignment.splitlines()) if not re.search(r"\bcolor [1-9]|thread-local", a.text)]
    spans, order = _spans(ranges.splitlines())
    instructions = {
        one.name: (computation, one) for computation in module.computations.values() for one in computation.instructions
    }
    names = Names(module, instructions, named or {}, whole or {})
    arguments = [a for a in allocations if re.search(r"parameter \d+", a.text)]
    buffers = [names.argument(a.size, a.values) for a in arguments]
    backward = min((at for at, name in order.items() if names.is_backward_product(name)), default=None)
    arenas = [a for a in allocations if a not in arguments and "constant" not in a.text]
    others = [a for a in allocations if a not in arguments and a not in arenas]
    gaps = 0
    for arena in arenas:
        alive, gap = _fullest(arena, spans)
        gaps += gap
        for values in alive:
            buffers.append(names.temporary(values, spans, backward))
    for one in others:
        buffers.append(Buffered(one.size, "temporaries", "constant", one.values[0].shape if one.values else ""))
    buffers.sort(key=lambda buffer: -buffer.bytes)
    return Memory(sum(a.size for a in allocations), tuple(buffers), gaps)


def _allocations(lines: Iterable[str]) -> list[_Allocation]:
    found: list[_Allocation] = []
    for line in lines:
        if head := _ALLOCATION.match(line):
            found.append(_Allocation(int(head[1]), head[2], []))
        elif found and (value := _VALUE.match(line)):
            found[-1].values.append(Value(value[1], int(value[2]), int(value[3]), value[4]))
    return found


def _spans(lines: list[str]) -> tuple[dict[str, tuple[int, int]], dict[int, str]]:
    """From when to when each value is needed, and what runs at each time."""
    spans, order = {}, {}
    for line in lines:
        if span := _RANGE.match(line):
            spans[span[1].removesuffix("{}")] = int(span[2]), int(span[3])
        elif step := _STEP.match(line):
            order[int(step[1])] = step[2]
    return spans, order


def _fullest(arena: _Allocation, spans) -> tuple[list[list[Value]], int]:
    """The buffers of an arena at the time that most of it is in use, each as the values that share it, and what is empty."""
    timed = [(value, *spans[value.name]) for value in arena.values if value.name in spans and value.size]
    if not timed:
        return ([arena.values], 0) if arena.values else ([], arena.size)
    timed.sort(key=lambda one: one[1])
    most, now, alive = -1, 0, list[tuple[Value, int, int]]()
    for at, one in enumerate(timed):
        alive.append(one)
        if at + 1 < len(timed) and timed[at + 1][1] == one[1]:
            continue
        alive = [other for other in alive if other[2] >= one[1]]
        if sum(value.size for value, _, _ in alive) > most:  # only then can they cover more
            used = _union((value.offset, value.offset + value.size) for value, _, _ in alive)
            most, now = max((most, now), (used, one[1]), key=lambda found: found[0])
    pieces = {(value.offset, value.size) for value, start, end in timed if start <= now <= end}
    kept: list[list[Value]] = []
    chains: dict[tuple[int, int], list[tuple[Value, int, int]]] = {}
    for value, start, end in timed:
        chains.setdefault((value.offset, value.size), []).append((value, start, end))
    covered: list[tuple[int, int]] = []
    for offset, size in sorted(pieces, key=lambda piece: -piece[1]):
        before = _union(covered)
        covered.append((offset, offset + size))
        if _union(covered) > before:  # a value inside another one's memory is no buffer of its own
            kept.append(_chain(chains[offset, size], now))
    return kept, arena.size - most


def _chain(timed: list[tuple[Value, int, int]], now: int) -> list[Value]:
    """Of the values in one place, those that hand it on to one another until and after ``now``: through a loop, say."""
    first = last = now
    chain: list[Value] = []
    rest = sorted(timed, key=lambda one: one[1])
    while near := [one for one in rest if one[1] <= last + 1 and one[2] >= first - 1]:
        rest = [one for one in rest if one not in near]
        chain += [value for value, _, _ in near]
        first, last = min(first, *(one[1] for one in near)), max(last, *(one[2] for one in near))
    return chain


def _union(pieces: Iterable[tuple[int, int]]) -> int:
    total, reached = 0, -1
    for start, end in sorted(pieces):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def load(folder: Path, module: Module, named: Dims | None = None, whole: Dims | None = None) -> Memory | None:
    """Memory, of the texts in a folder that XLA has dumped to; None where they are not there."""
    found = [next(iter(folder.glob(f"*{end}.txt")), None) for end in ("optimizations-buffer-assignment", "live-range")]
    if found[0] is None or found[1] is None:
        return None
    return read(found[0].read_text(), found[1].read_text(), module, named, whole)
