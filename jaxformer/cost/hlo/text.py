"""XLA's text of an optimized program, parsed: its computations, their instructions and shapes, and how often each loop runs."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?[\w.\-]+ = ")
_CALLED = re.compile(r"(calls|to_apply|condition|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_COPIES = ("copy", "bitcast", "convert", "reshape")


@dataclass(frozen=True)
class Shape:
    """One array. space: 0 is the main memory, all others are on the chip."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def bytes(self) -> float:
        """An element's bits stand in the name of its dtype, as in bf16, s4 and f8e4m3fn."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.dims) * (int(bits[0]) / 8 if bits else float(self.dtype == "pred"))


@dataclass(eq=False)
class Instruction:
    """``name = shapes op(operands), attributes`` in a computation."""

    computation: "Computation"
    name: str
    shapes: list[Shape]
    op: str
    operands: list[str]
    text: str
    """The operands and the closing parenthesis, and all attributes."""
    is_root: bool = False

    @cached_property
    def inputs(self) -> list["Instruction"]:
        """The operands as instructions; one without shapes for a name that the computation does not have."""
        known = self.computation.by_name
        return [known.get(name) or Instruction(self.computation, name, [], "unknown", [], "") for name in self.operands]

    @cached_property
    def called(self) -> dict[str, "Computation"]:
        """The computations that it calls, by the attribute that names them."""
        known = self.computation.module.computations
        return {attribute: known[name] for attribute, name in _CALLED.findall(self.text) if name in known}

    @property
    def inner(self) -> "Computation | None":
        """The computation of a fusion, or of an instruction that starts something asynchronous."""
        return self.called.get("calls") if self.op in ("fusion", "async-start") else None

    @property
    def branches(self) -> list["Computation"]:
        """The computations of a conditional."""
        listed = _BRANCHES.search(self.text)
        names = [name.strip().lstrip("%") for name in listed[1].split(",")] if listed else []
        by_flag = [self.called[key] for key in ("true_computation", "false_computation") if key in self.called]
        return [self.computation.module.computations[name] for name in names] + by_flag

    @cached_property
    def op_name(self) -> str:
        """The scopes that JAX traced it in, and its primitive."""
        written = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.text)
        return written[1].replace("\\'", "'") if written else ""

    def number(self, pattern: str) -> int | None:
        """The first group of ``pattern`` in the text, as a number."""
        match = re.search(pattern, self.text)
        return int(match[1]) if match else None

    @property
    def parameter_number(self) -> int:
        """Which parameter of its computation it is."""
        return int(self.text.split(")")[0])

    @cached_property
    def trip_count(self) -> int | None:
        """How often a ``while`` runs: as XLA states, or by its condition ``i < bound`` and its step; None if neither tells."""
        if (stated := self.number(r'"?known_trip_count"?:\{"n":"(\d+)"\}')) is not None:
            return stated
        compared, text = _terms(self.called["condition"].root, "compare")
        results = self.called["body"].root
        if len(compared) != 2 or "direction=LT" not in text or results.op != "tuple":
            return None
        index, bound = _element(compared[0]), _constant(compared[1])
        if bound is None:
            bound = self._initial(_element(compared[1]))
        if index is None or bound is None:
            return None
        first = self._initial(index)
        added, _ = _terms(_source(results.inputs[index]), "add")
        step = next((n for term in added if (n := _constant(term)) is not None), None)
        return None if first is None or not step or step < 0 else max(0, -(-(bound - first) // step))

    def _initial(self, index: int | None) -> int | None:
        """The constant that an element of a loop's tuple is before the first iteration."""
        start = self.inputs[0]
        return _constant(_source(start.inputs[index])) if start.op == "tuple" and index is not None else None


def _source(instruction: Instruction, fusion: Instruction | None = None) -> Instruction:
    """The instruction that ``one`` is or copies; a parameter of a fusion is the fusion's operand."""
    while instruction.op in _COPIES or (instruction.op == "parameter" and fusion):
        if instruction.op in _COPIES:
            instruction = instruction.inputs[0]
        else:
            instruction, fusion = fusion.inputs[instruction.parameter_number], None  # type: ignore[union-attr]
    return instruction


def _terms(instruction: Instruction, op: str) -> tuple[list[Instruction], str]:
    """The operands of an instruction that is an ``op`` or a fusion around one, and its text."""
    inner = instruction.inner.root if instruction.inner else instruction
    fusion = instruction if instruction.inner else None
    return ([_source(term, fusion) for term in inner.inputs], inner.text) if inner.op == op else ([], "")


def _element(instruction: Instruction) -> int | None:
    """Which element of its computation's parameter it is."""
    is_element = instruction.op == "get-tuple-element" and instruction.inputs[0].op == "parameter"
    return instruction.number(r"index=(\d+)") if is_element else None


def _constant(instruction: Instruction) -> int | None:
    return instruction.number(r"^(-?\d+)\)") if instruction.op == "constant" else None


@dataclass(eq=False)
class Computation:
    """Instructions in the order they run in."""

    module: "Module"
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        return next((instruction for instruction in self.instructions if instruction.is_root), self.instructions[-1])

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {instruction.parameter_number: instruction for instruction in self.instructions if instruction.op == "parameter"}


@dataclass(eq=False)
class Module:
    """A program."""

    computations: dict[str, Computation] = field(default_factory=dict)
    entry: str = ""

    def executed(self, computation: Computation | None = None, times: float = 1) -> Iterator[tuple[Instruction, float]]:
        """Every instruction that runs by itself, and how often; a loop of unknown length counts once. Instructions inside
        fusions are left out."""
        for instruction in (computation or self.computations[self.entry]).instructions:
            yield instruction, times
            if instruction.op == "while":
                trips = 1 if instruction.trip_count is None else instruction.trip_count
                yield from self.executed(instruction.called["body"], times * trips)
            elif instruction.op == "call":
                yield from self.executed(instruction.called["to_apply"], times)
            elif instruction.op == "conditional" and instruction.branches:  # the longest branch stands for all
                yield from self.executed(max(instruction.branches, key=lambda branch: len(branch.instructions)), times)


def parse(text: str) -> Module:
    """A program from XLA's text of it. Raises ValueError if it has no entry computation or that has no instructions."""
    module, current = Module(), None
    for line in text.splitlines():
        if line[:1] not in (" ", "}", "") and (head := _HEAD.match(line)):
            current = module.computations[head[2]] = Computation(module, head[2])
            module.entry = head[2] if head[1] else module.entry
        elif line.rstrip() == "}" or line.startswith("}, execution_thread"):
            current = None
        elif current is not None and _INSTRUCTION.match(line):
            current.instructions.append(_instruction(current, line))
        elif current is not None and current.instructions:  # the attributes of kernels continue on lines of their own
            current.instructions[-1].text += line
    if not module.entry or not module.computations[module.entry].instructions:
        raise ValueError("it has no ENTRY computation with instructions")
    return module


def _instruction(computation: Computation, line: str) -> Instruction:
    left, _, right = line.strip().partition(" = ")
    end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    op, _, rest = right[end:].lstrip().partition("(")
    operands = re.findall(r"%([\w.\-]+)", rest[: _closing("(" + rest, 0) - 1])
    name, is_root = left.removeprefix("ROOT ").lstrip("%"), left.startswith("ROOT ")
    return Instruction(computation, name, shapes(right[:end]), op, operands, rest, is_root)


def shapes(text: str) -> list[Shape]:
    """All arrays of a (tuple) shape."""
    arrays = []
    for dtype, dims, layout in _SHAPE.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        numbers = tuple(int(n.lstrip("<=")) for n in dims.split(",") if n)
        arrays.append(Shape(dtype, numbers, int(space[1]) if space else 0))
    return arrays


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at ``start`` closes."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if not depth:
            return at
    return len(text)
