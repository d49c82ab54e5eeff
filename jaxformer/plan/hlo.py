"""The text of an optimised XLA program as records: computations, instructions, shapes, and how often each loop runs."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

SIZES: dict[str, float] = {
    "pred": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "f64": 8,
    "s64": 8,
    "u64": 8,
    "c64": 8,
}
SIZES |= {"s8": 1, "u8": 1, "s4": 0.5, "u4": 0.5, "s2": 0.25, "u2": 0.25, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_STARTS = re.compile(r"^\s+(ROOT )?%?[\w.\-]+ = ")
_CALLED = re.compile(r"(calls|to_apply|condition|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclass(frozen=True)
class Shape:
    """One array. space: 0 is the main memory, others are on the chip."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def bytes(self) -> float:
        return math.prod(self.dims) * SIZES.get(self.dtype, 1)  # float8 of any kind is a byte


@dataclass
class Instruction:
    """``name = shapes op(operands), rest``."""

    name: str
    shapes: list[Shape]
    op: str
    operands: list[str]
    text: str
    """What stands in the parentheses, and all after it."""
    root: bool

    @cached_property
    def called(self) -> dict[str, str]:
        return dict(_CALLED.findall(self.text))

    @cached_property
    def branches(self) -> list[str]:
        found = _BRANCHES.search(self.text)
        names = [name.strip().lstrip("%") for name in found[1].split(",")] if found else []
        return names + [self.called[k] for k in ("true_computation", "false_computation") if k in self.called]

    @cached_property
    def op_name(self) -> str:
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.text)
        return found[1].replace("\\'", "'") if found else ""

    def number(self, pattern: str) -> int | None:
        """The first group of ``pattern`` in the text, as a number."""
        found = re.search(pattern, self.text)
        return int(found[1]) if found else None


@dataclass
class Computation:
    """Instructions in the order they run in."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {one.name: one for one in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        return next((one for one in self.instructions if one.root), self.instructions[-1])

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(one.text.split(")")[0]): one for one in self.instructions if one.op == "parameter"}


@dataclass
class Module:
    """A program."""

    computations: dict[str, Computation]
    entry: Computation

    def visit(self, computation: Computation | None = None, times: float = 1) -> Iterator[tuple[Computation, int, float]]:
        """Every instruction that runs by itself, as (computation, index, how often); loops that are not understood count
        once and are listed in ``unknown``. What stands inside fusions is not visited."""
        computation = computation or self.entry
        for index, one in enumerate(computation.instructions):
            yield computation, index, times
            if one.op == "while":
                trips = self.trips(computation, one)
                if trips is None:
                    self.unknown.add(one.name)
                yield from self.visit(self.computations[one.called["body"]], times * (1 if trips is None else trips))
            elif one.op == "call":
                yield from self.visit(self.computations[one.called["to_apply"]], times)
            elif one.op == "conditional" and one.branches:  # of several ways the longest
                yield from self.visit(
                    max((self.computations[b] for b in one.branches), key=lambda c: len(c.instructions)), times
                )

    @cached_property
    def unknown(self) -> set[str]:
        return set()

    def inside(self, one: Instruction) -> Computation | None:
        """What a fusion, or the start of something asynchronous, is made of."""
        name = one.called.get("calls")
        return self.computations.get(name) if name else None

    def trips(self, computation: Computation, loop: Instruction) -> int | None:
        """How often a ``while`` runs: as XLA says, or by its condition ``i < bound`` and its step; None where neither tells."""
        if (known := loop.number(r'"?known_trip_count"?:\{"n":"(\d+)"\}')) is not None:
            return known
        condition, body = (self.computations[loop.called[name]] for name in ("condition", "body"))
        compared, text = self._terms(condition, condition.root, "compare")
        if len(compared) != 2 or "direction=LT" not in text:
            return None
        index = self._element(*compared[0])
        bound = self._constant(*compared[1])
        if bound is None and (at := self._element(*compared[1])) is not None:
            bound = self._initial(computation, loop, at)
        if index is None or bound is None or body.root.op != "tuple":
            return None
        start = self._initial(computation, loop, index)
        added, _ = self._terms(body, _origin(body, body.root.operands[index]), "add")
        step = next((n for term in added if (n := self._constant(*term)) is not None), None)
        if start is None or not step or step < 0:
            return None
        return max(0, -(-(bound - start) // step))

    def _terms(self, computation: Computation, one: Instruction | None, op: str) -> tuple[list[tuple[Computation, str]], str]:
        """The operands of an instruction that is an ``op``, or a fusion of one, each with where it stands; and its text."""
        inner = self.inside(one) if one is not None and one.op == "fusion" else None
        if one is None or (inner.root if inner else one).op != op:
            return [], ""
        if inner is None:
            return [(computation, name) for name in one.operands], one.text
        terms = []
        for name in inner.root.operands:
            origin = _origin(inner, name)
            if origin is not None and origin.op == "parameter":
                terms.append((computation, one.operands[int(origin.text.split(")")[0])]))
            else:
                terms.append((inner, name))
        return terms, inner.root.text

    def _element(self, computation: Computation, name: str) -> int | None:
        """Which element of the loop's tuple ``name`` is."""
        one = _origin(computation, name)
        if one is None or one.op != "get-tuple-element" or computation.by_name[one.operands[0]].op != "parameter":
            return None
        return one.number(r"index=(\d+)")

    def _constant(self, computation: Computation, name: str) -> int | None:
        one = _origin(computation, name)
        return one.number(r"^(-?\d+)\)") if one is not None and one.op == "constant" else None

    def _initial(self, computation: Computation, loop: Instruction, index: int) -> int | None:
        """What an element of the loop's tuple is before the first turn."""
        made = computation.by_name.get(loop.operands[0])
        if made is None or made.op != "tuple" or index >= len(made.operands):
            return None
        return self._constant(computation, made.operands[index])


def _origin(computation: Computation, name: str) -> Instruction | None:
    """What ``name`` is, or is a copy of."""
    one = computation.by_name.get(name)
    while one is not None and one.op in _SAME:
        one = computation.by_name.get(one.operands[0])
    return one


_SAME = ("copy", "bitcast", "convert", "reshape")


def read(text: str) -> Module:
    """A module from XLA's text of it. Raises ValueError where it has no entry."""
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        if line[:1] not in (" ", "}", "") and (head := _HEAD.match(line)):
            current = computations[head[2]] = Computation(head[2])
            entry = current if head[1] else entry
        elif line.rstrip() == "}" or line.startswith("}, execution_thread"):
            current = None
        elif current is not None and _STARTS.match(line):
            current.instructions.append(_instruction(line))
        elif current is not None and current.instructions:  # attributes of kernels go on in lines of their own
            current.instructions[-1].text += line
    if entry is None:
        raise ValueError("this text is no XLA program: it has no ENTRY")
    return Module(computations, entry)


def _instruction(line: str) -> Instruction:
    left, _, right = line.strip().partition(" = ")
    end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    rest = right[end:].lstrip()
    op, _, rest = rest.partition("(")
    inside = rest[: _closing("(" + rest, 0) - 1]
    operands = re.findall(r"%([\w.\-]+)", inside)
    return Instruction(
        left.removeprefix("ROOT ").lstrip("%"), shapes(right[:end]), op, operands, rest, left.startswith("ROOT ")
    )


def shapes(text: str) -> list[Shape]:
    """All arrays of a (tuple) shape."""
    found = []
    for dtype, dims, layout in _SHAPE.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        numbers = tuple(int(n.lstrip("<=")) for n in dims.split(",") if n)
        found.append(Shape(dtype, numbers, int(space[1]) if space else 0))
    return found


def _closing(text: str, start: int) -> int:
    """Where the parenthesis closes that opens at ``start``."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if not depth:
            return at
    return len(text)
