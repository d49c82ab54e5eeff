"""What to call the buffers of a program: arguments by their path, all else by the scopes it was traced in."""

import re
from dataclasses import dataclass

from jaxformer.plan.count import flops
from jaxformer.plan.hlo import Computation, Instruction, Module, shapes
from jaxformer.plan.record import Buffered

KINDS = ("parameters", "optimizer", "cache", "batch", "gradients", "activations", "parameter copies", "temporaries")
"""What a buffer is. activations: made in the forward pass, needed in the backward pass; parameter copies: the same, of the
shape of a parameter, which are parameters cast or brought together; gradients: made after that, of the shape of a parameter;
temporaries: all else."""
_ARGUMENTS = {"params": "parameters", "opt_state": "optimizer", "batch": "batch", "prompts": "batch", "cache": "cache"}
_BORING = {"broadcast_in_dim", "while", "dynamic_update_slice", "dynamic_slice", "copy", "squeeze", "reshape", "transpose", ""}
_PASSED = {"bitcast", "copy", "convert", "get-tuple-element", "reshape", "transpose"}
_PASSED |= {"copy-start", "copy-done", "slice-start", "slice-done"}
_WRAPPERS = {"while", "body", "cond", "closed_call", "checkpoint", "remat", "remat2", "rematted_computation", "core_call"}


Dims = dict[str, tuple[int, ...]]
"""Dimensions by name."""


@dataclass
class Value:
    """Something that a program computes, and where in an allocation it lies."""

    name: str
    size: int
    offset: int
    shape: str


class Names:
    """What to call the values of a program."""

    def __init__(self, module: Module, instructions, named: Dims, whole: Dims):
        self.module, self.instructions = module, instructions
        self.named: dict[tuple[int, ...], list[str]] = {}
        for name, dims in named.items():
            exact = tuple(n for n in dims if n > 1)
            for key in {exact, tuple(sorted(exact))}:
                self.named.setdefault(key, []).append(name)
        self.parameters: dict[tuple[int, ...], list[str]] = {}
        for name, dims in whole.items():
            self.parameters.setdefault(tuple(n for n in dims if n > 1), []).append(name)

    def path(self, value: str) -> str:
        """The scopes that a value was traced in."""
        found = self.instructions.get(value.split("{")[0])
        return found[1].op_name if found else ""

    def is_backward_product(self, name: str) -> bool:
        """Whether the backward pass has begun where this runs."""
        found = self.instructions.get(name)
        return bool(found) and "transpose(" in found[1].op_name and flops(self.module, *found) > 0

    def argument(self, size: int, values: list[Value]) -> Buffered:
        """One of the program's arguments, as the values that share its memory."""
        path = next((p for value in values if (p := self.path(value.name)) and not p.startswith("jit(")), "")
        start = re.match(r"(?:state\.)?(\w*)", path)
        kind = _ARGUMENTS.get(start[1] if start else "", "temporaries")
        shape = values[0].shape if values else ""
        if kind == "parameters":
            for dims in {_essence(shape), shapes(shape)[0].dims}:
                self.parameters.setdefault(dims, []).append(_dotted(path))
        return Buffered(size, kind, _dotted(path) or "argument", _plain(shape))

    def temporary(self, values: list[Value], spans, backward: int | None) -> Buffered:
        """values: all that share the memory, one after another."""
        shape = values[0].shape
        paths = [path for value in values if (path := self._made(value.name))]
        paths.sort(key=lambda path: (path.split("/")[-1] in _BORING, "transpose(" in path))
        path = paths[0] if paths else ""
        timed = [spans[value.name] for value in values if value.name in spans] or [(0, 0)]
        start, end = min(start for start, _ in timed), max(end for _, end in timed)
        size, dims = values[0].size, shapes(shape)[0].dims if shapes(shape) else ()
        of = list(dict.fromkeys(self.parameters.get(dims) or self.parameters.get(_essence(shape), [])))
        if re.match(r"(state\.)?(params|cache)\b", path):  # an argument, cast or brought together
            kind = "parameter copies" if "params" in path.split("[")[0] else "temporaries"
            return Buffered(size, kind, f"{_dotted(path)}, a copy", _plain(shape))
        if backward is not None and start < backward:
            kind = "temporaries" if end <= backward else "parameter copies" if of else "activations"
        else:
            kind = "gradients" if of and backward is not None else "temporaries"
        if of and kind != "temporaries":
            return Buffered(size, kind, " or ".join(of), _plain(shape))
        return Buffered(size, kind, self._activation(clean(path) or values[0].name, shape), _plain(shape))

    def _activation(self, name: str, shape: str) -> str:
        """The named activation that this must be, where there is one of this shape in its scope; layers may be stacked, and
        axes in another order."""
        dims = _essence(shape)
        ordered = tuple(sorted(dims))
        forms = (dims, dims[1:], ordered, *(ordered[:i] + ordered[i + 1 :] for i in range(len(ordered))))
        *scope, last = name.split("/")
        for known in (known for form in forms for known in self.named.get(form, ())):
            if scope and scope == [part for part in known.split(".")[:-1] if not part.isdigit()]:
                return f"{_every(known)} ({last})"
            if re.fullmatch(r"[\w\-]+\.\d+(\{\d+\})?", name):  # XLA's own name, which tells nothing
                return f"of the shape of {_every(known)}"
        return name

    def _made(self, value: str, depth: int = 0) -> str:
        """The scopes of what made a value; of a slice written into a stack, of the slice."""
        found = self.instructions.get(value.split("{")[0])
        if not found:
            return ""
        computation, one = found
        path = one.op_name
        if depth > 4 or (path.split("/")[-1] not in _BORING and one.op != "parameter"):
            return path
        source = self._update(computation, one, value)
        return (self._made(source, depth + 1) if source else "") or path

    def _update(self, computation: Computation, one: Instruction, value: str) -> str | None:
        if one.op in _PASSED and one.operands:
            return one.operands[0]
        if one.op == "dynamic-update-slice":
            return one.operands[1]
        inner = self.module.inside(one) if one.op == "fusion" else None
        if inner is None:
            return None
        output = inner.root
        if output.op == "tuple" and (number := re.search(r"\{(\d+)\}", value)):
            output = inner.by_name[output.operands[int(number[1])]]
        for _ in range(8):
            if output.op == "parameter":
                given = int(output.text.split(")")[0])
                return one.operands[given] if given < len(one.operands) else None
            if output.op_name.split("/")[-1] not in _BORING:
                return output.name
            if not output.operands:
                return None
            output = inner.by_name[output.operands[1 if output.op == "dynamic-update-slice" else 0]]
        return None


def _every(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _dotted(path: str) -> str:
    """``state.opt_state[1][0].mu['head']['kernel']`` is ``mu.head.kernel``."""
    name = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)
    return re.sub(r"^(state\.)?(params\.|opt_state\.[\d.]*(?=[a-z]))?", "", name)


def _plain(shape: str) -> str:
    found = shapes(shape)
    return f"{found[0].dtype}[{', '.join(map(str, found[0].dims))}]" if found else shape


def clean(path: str) -> str:
    """``jit(update)/transpose(jvp(decoder))/while/body/mlp/dot_general`` is ``decoder/mlp/dot_general, backward``."""
    parts = []
    for part in path.split(";")[0].split("/"):
        while wrapped := re.fullmatch(r"(?:jvp|transpose|vmap|remat|checkpoint)\((.*)\)", part):
            part = wrapped[1]
        if part and part not in _WRAPPERS and not part.startswith("jit("):
            parts.append(part)
    return ("/".join(parts) or path.split("/")[-1]) + (", backward" if "transpose(" in path else "")


def _essence(shape: str) -> tuple[int, ...]:
    found = shapes(shape)
    return tuple(n for n in found[0].dims if n > 1) if found else ()
