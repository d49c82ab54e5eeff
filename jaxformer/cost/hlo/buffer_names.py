"""Names for the buffers of a program: an argument's by its path, every other by the scopes that its value was traced in."""

import re
from dataclasses import dataclass

from jaxformer.cost.hlo.hlo_cost import flops
from jaxformer.cost.hlo.text import Instruction, Module, shapes
from jaxformer.cost.plan import Buffer

_ARGUMENTS = {"params": "parameters", "opt_state": "optimizer", "batch": "batch", "prompts": "batch", "cache": "cache"}
_MOVES = {"bitcast", "copy", "convert", "get-tuple-element", "reshape", "transpose", "copy-start", "copy-done"}
_MOVES |= {"slice-start", "slice-done"}
_SILENT = {"broadcast_in_dim", "while", "dynamic_update_slice", "dynamic_slice", "copy", "squeeze", "reshape", "transpose", ""}
"""Primitives of JAX that say nothing of what a value is."""
_WRAPPERS = {"while", "body", "cond", "closed_call", "checkpoint", "remat", "remat2", "rematted_computation", "core_call"}

Dims = dict[str, tuple[int, ...]]
"""Dimensions by name."""
Span = tuple[int, int]
"""The first and the last time at which a value is needed."""


@dataclass
class Value:
    """A value that a program computes, and where in its allocation it lies."""

    name: str
    size: int
    offset: int
    shape: str


class Names:
    """Names for the values of a program."""

    def __init__(self, module: Module, activations: Dims, parameters: Dims):
        computations = module.computations.values()
        self._instructions = {
            instruction.name: instruction for computation in computations for instruction in computation.instructions
        }
        self._activations: dict[tuple[int, ...], list[str]] = {}
        for name, dims in activations.items():
            for key in {_wide(dims), tuple(sorted(_wide(dims)))}:
                self._activations.setdefault(key, []).append(name)
        self._parameters: dict[tuple[int, ...], list[str]] = {}
        for name, dims in parameters.items():
            self._parameters.setdefault(_wide(dims), []).append(name)

    def is_backward_product(self, name: str) -> bool:
        """Whether an instruction is a matrix product of the backward pass."""
        instruction = self._instructions.get(name)
        return instruction is not None and "transpose(" in instruction.op_name and flops(instruction) > 0

    def argument(self, size: int, values: list[Value]) -> Buffer:
        """The buffer of an argument of the program. values: all that share its memory."""
        paths = [instruction.op_name for value in values if (instruction := self._instruction(value.name))]
        path = next((path for path in paths if path and not path.startswith("jit(")), "")
        start = re.match(r"(?:state\.)?(\w*)", path)
        kind = _ARGUMENTS.get(start[1] if start else "", "temporaries")
        shape = values[0].shape if values else ""
        if kind == "parameters":
            for dims in {_wide(_dims(shape)), _dims(shape)}:
                self._parameters.setdefault(dims, []).append(_dotted(path))
        return Buffer(size, kind, _dotted(path) or "argument", _plain(shape))

    def temporary(self, values: list[Value], spans: dict[str, Span], backward: int | None) -> Buffer:
        """The buffer that ``values`` share one after another. backward: when the backward pass begins, if there is one."""
        size, shape = values[0].size, values[0].shape
        paths = [path for value in values if (path := self._origin(value.name))]
        path = min(paths, key=lambda path: (_primitive(path) in _SILENT, "transpose(" in path), default="")
        if re.match(r"(state\.)?(params|cache)\b", path):  # an argument, cast or gathered
            kind = "parameter copies" if "params" in path.split("[")[0] else "temporaries"
            return Buffer(size, kind, f"{_dotted(path)}, a copy", _plain(shape))
        timed = [spans[value.name] for value in values if value.name in spans] or [(0, 0)]
        start, end = min(start for start, _ in timed), max(end for _, end in timed)
        same_shape = self._parameters.get(_dims(shape)) or self._parameters.get(_wide(_dims(shape)), [])
        if backward is not None and start < backward < end:
            kind = "parameter copies" if same_shape else "activations"
        else:
            kind = "gradients" if same_shape and backward is not None and start >= backward else "temporaries"
        if same_shape and kind != "temporaries":
            return Buffer(size, kind, " or ".join(dict.fromkeys(same_shape)), _plain(shape))
        return Buffer(size, kind, self._activation(_scopes(path) or values[0].name, shape), _plain(shape))

    def _activation(self, name: str, shape: str) -> str:
        """The named activation that has this shape and is named in this scope, if there is one; layers may be stacked, and axes
        in another order."""
        dims = _wide(_dims(shape))
        ordered = tuple(sorted(dims))
        forms = (dims, dims[1:], ordered, *(ordered[:i] + ordered[i + 1 :] for i in range(len(ordered))))
        *scopes, last = name.split("/")
        for known in (known for form in forms for known in self._activations.get(form, ())):
            every_layer = re.sub(r"\.\d+\.", ".*.", known)
            if scopes and scopes == [scope for scope in known.split(".")[:-1] if not scope.isdigit()]:
                return f"{every_layer} ({last})"
            if re.fullmatch(r"[\w\-]+\.\d+(\{\d+\})?", name):  # XLA's own name, which says nothing
                return f"of the shape of {every_layer}"
        return name

    def _instruction(self, value: str) -> Instruction | None:
        return self._instructions.get(value.split("{")[0])

    def _origin(self, value: str, depth: int = 0) -> str:
        """The scopes and primitive that computed a value; for a slice written into a stack, those of the slice."""
        instruction = self._instruction(value)
        if instruction is None:
            return ""
        if depth > 4 or (_primitive(instruction.op_name) not in _SILENT and instruction.op != "parameter"):
            return instruction.op_name
        source = self._moved(instruction, value)
        return (self._origin(source, depth + 1) if source else "") or instruction.op_name

    def _moved(self, instruction: Instruction, value: str) -> str | None:
        """The value that an instruction only moves elsewhere."""
        if instruction.op in _MOVES and instruction.operands:
            return instruction.operands[0]
        if instruction.op == "dynamic-update-slice":
            return instruction.operands[1]
        if instruction.op != "fusion" or instruction.inner is None:
            return None
        output = instruction.inner.root
        if output.op == "tuple" and (number := re.search(r"\{(\d+)\}", value)):
            output = output.inputs[int(number[1])]
        for _ in range(8):
            if output.op == "parameter":
                return next(iter(instruction.operands[output.parameter_number :]), None)
            if _primitive(output.op_name) not in _SILENT:
                return output.name
            if not output.operands:
                return None
            output = output.inputs[1 if output.op == "dynamic-update-slice" else 0]
        return None


def _primitive(path: str) -> str:
    return path.split("/")[-1]


def _dotted(path: str) -> str:
    """``state.opt_state[1][0].mu['head']['kernel']`` is ``mu.head.kernel``."""
    name = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)
    return re.sub(r"^(state\.)?(params\.|opt_state\.[\d.]*(?=[a-z]))?", "", name)


def _scopes(path: str) -> str:
    """``jit(update)/transpose(jvp(decoder))/while/body/mlp/dot_general`` is ``decoder/mlp/dot_general, backward``."""
    scopes = []
    for scope in path.split(";")[0].split("/"):
        while wrapped := re.fullmatch(r"(?:jvp|transpose|vmap|remat|checkpoint)\((.*)\)", scope):
            scope = wrapped[1]
        if scope and scope not in _WRAPPERS and not scope.startswith("jit("):
            scopes.append(scope)
    return ("/".join(scopes) or _primitive(path)) + (", backward" if "transpose(" in path else "")


def _dims(shape: str) -> tuple[int, ...]:
    arrays = shapes(shape)
    return arrays[0].dims if arrays else ()


def _wide(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in dims if n > 1)


def _plain(shape: str) -> str:
    arrays = shapes(shape)
    return f"{arrays[0].dtype}[{', '.join(map(str, arrays[0].dims))}]" if arrays else shape
