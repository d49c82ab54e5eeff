"""What a program does on one device: FLOPs of its matrix products, cycles, memory traffic. Loops count as often as they run."""

import math
import re
from dataclasses import dataclass, field

from jaxformer.plan.hlo import Computation, Instruction, Module, Shape

KERNELS = ("tpu_custom_call",)
"""Targets of custom calls that are Pallas kernels, of which XLA counts nothing."""
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "after-all"}
_FREE |= {"partition-id", "copy-done", "slice-done", "async-done", "async-update", "all-gather-done", "all-reduce-done"}
_FREE |= {"collective-permute-done", "iota", "opt-barrier"}


@dataclass
class Work:
    """Of one run of the program, on one device."""

    flops: float = 0.0
    """Of dots and convolutions, a multiply-add being two; what the backward pass recomputes is in it."""
    kernel_flops: float = 0.0
    """Of Pallas kernels, by their own estimate, or by the formula of attention; not in ``flops``."""
    cycles: float = 0.0
    """The compiler's ``estimated_cycles``; without Pallas kernels and collectives."""
    traffic: float = 0.0
    """Bytes between main memory and chip: operands and results of every instruction that runs by itself."""
    kernels: dict[str, float] = field(default_factory=dict)
    """How often each Pallas kernel runs."""
    unknown_kernels: set[str] = field(default_factory=set)
    unknown_loops: set[str] = field(default_factory=set)
    """Loops whose number of turns is not known; they count once."""


def count(module: Module) -> Work:
    """All that ``Work`` tells of a program."""
    work = Work()
    for computation, index, times in module.visit():
        one = computation.instructions[index]
        work.flops += times * flops(module, computation, one)
        work.cycles += times * (one.number(r'"estimated_cycles":"(\d+)"') or 0)
        work.traffic += times * traffic(module, computation, one)
        for kernel, own in _kernels(module, computation, one):
            name = _kernel_name(kernel)
            work.kernels[name] = work.kernels.get(name, 0) + times
            found = kernel_flops(own, kernel)
            if found is None:
                work.unknown_kernels.add(name)
            else:
                work.kernel_flops += times * found
    work.unknown_loops = module.unknown
    return work


def flops(module: Module, computation: Computation, one: Instruction) -> float:
    """Of one instruction and all that is fused into it."""
    if one.op == "dot":
        return _dot(computation, one)
    if one.op == "convolution":
        return _convolution(computation, one)
    inner = module.inside(one) if one.op in ("fusion", "async-start") else None
    return sum(flops(module, inner, part) for part in inner.instructions) if inner else 0.0


def _dot(computation: Computation, one: Instruction) -> float:
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.text)
    left = _shape_of(computation, one.operands[0])
    axes = [int(n) for n in contracted[1].split(",") if n] if contracted else []
    return 2.0 * math.prod(one.shapes[0].dims) * math.prod(left.dims[axis] for axis in axes)


def _convolution(computation: Computation, one: Instruction) -> float:
    """2 × the multiply-adds that meet an element of the input: not its padding, not the holes of its dilation, which is how
    TPUs write products with batch dimensions."""
    found = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.text)
    if not found:
        return 0.0
    left, right = (_shape_of(computation, name) for name in one.operands[:2])
    left_of, right_of, out_of = ({letter: at for at, letter in enumerate(labels)} for labels in found.groups())
    window = {key: value.split("x") for key, value in re.findall(r"(\w+)=([\dx_\-]+)", _window(one.text))}
    pairs = 1
    for number, letter in enumerate(sorted(filter(str.isdigit, found[1]))):
        setting = lambda key, default: int(window[key][number]) if key in window else default  # noqa: B023
        low = int(window["pad"][number].split("_")[0]) if "pad" in window else 0
        pairs *= _valid(
            size=left.dims[left_of[letter]],
            window=right.dims[right_of[letter]],
            out=one.shapes[0].dims[out_of[letter]],
            stride=setting("stride", 1),
            low=low,
            dilation=setting("lhs_dilate", 1),
            window_dilation=setting("rhs_dilate", 1),
        )
    features = right.dims[right_of["i"]] * one.shapes[0].dims[out_of["f"]]
    groups = one.number(r"batch_group_count=(\d+)") or 1
    return 2.0 * pairs * features * left.dims[left_of["b"]] / groups


def _window(text: str) -> str:
    found = re.search(r"window=\{([^}]*)\}", text)
    return found[1] if found else ""


def _valid(size: int, window: int, out: int, stride: int, low: int, dilation: int, window_dilation: int) -> int:
    """Pairs of an output and a place in the window, along one axis, that meet an element of the input."""
    end, pairs = (size - 1) * dilation, 0
    for place in range(window):
        first = place * window_dilation - low
        if dilation == 1:  # outputs with 0 <= first + stride·o <= end
            pairs += max(0, min(out - 1, (end - first) // stride) - max(0, -(first // stride)) + 1)
        else:
            at = (first + stride * o for o in range(out))
            pairs += sum(0 <= a <= end and a % dilation == 0 for a in at)
    return pairs


def traffic(module: Module, computation: Computation, one: Instruction) -> float:
    """Bytes that one instruction reads from main memory and writes to it. Of what it only slices, the slice; of what it
    updates in place, the update."""
    if one.op in _FREE:
        return 0.0
    inner = module.inside(one) if one.op == "fusion" else None
    if one.op in ("dynamic-slice", "slice", "gather"):
        return 2 * _bytes(one.shapes)
    if one.op == "dynamic-update-slice":
        return 2 * _bytes([_shape_of(computation, one.operands[1])])
    if one.op in ("copy-start", "slice-start", "async-start"):  # (to, from, …): one side is on the chip
        if (inside := module.inside(one)) and not inside.root.op.endswith(("slice", "copy")):
            return 0.0
        moved = min((shape for shape in one.shapes[:2]), key=lambda shape: shape.bytes)
        return moved.bytes * sum(shape.space == 0 for shape in one.shapes[:2])
    if one.op == "custom-call" and not _is_kernel(one):
        return 0.0
    read = 0.0
    for number, name in enumerate(one.operands):
        source = computation.by_name.get(name)
        if source is not None:
            read += _read(inner, number, source.shapes)
    return read + (_written(inner) if inner else _bytes(one.shapes))


def _read(inner: Computation | None, number: int, shapes: list[Shape]) -> float:
    own = inner.parameters.get(number) if inner else None
    if inner is None or own is None:
        return _bytes(shapes)
    users = [user for user in inner.instructions if own.name in user.operands]
    if users and all(user.op == "dynamic-slice" for user in users):
        return min(_bytes(shapes), sum(user.shapes[0].bytes for user in users)) if _bytes(shapes) else 0.0
    if users and all(user.op == "dynamic-update-slice" and user.operands[0] == own.name for user in users):
        return 0.0
    return _bytes(shapes)


def _written(inner: Computation) -> float:
    outputs = [inner.root]
    if inner.root.op == "tuple":
        outputs = [inner.by_name[name] for name in inner.root.operands]
    total = 0.0
    for output in outputs:
        while output.op == "bitcast":
            output = inner.by_name[output.operands[0]]
        if output.op == "dynamic-update-slice" and _bytes(output.shapes):
            total += _shape_of(inner, output.operands[1]).bytes
        else:
            total += _bytes(output.shapes)
    return total


def _bytes(shapes: list[Shape]) -> float:
    return sum(shape.bytes for shape in shapes if shape.space == 0)


def _shape_of(computation: Computation, name: str) -> Shape:
    return computation.by_name[name].shapes[0]


# Pallas kernels


def _kernels(module, computation, one):
    if _is_kernel(one):
        yield one, computation
    elif one.op in ("fusion", "async-start") and (inner := module.inside(one)):
        yield from ((part, inner) for part in inner.instructions if _is_kernel(part))


def _is_kernel(one: Instruction) -> bool:
    target = re.search(r'custom_call_target="([^"]*)"', one.text)
    return one.op == "custom-call" and target is not None and target[1] in KERNELS


def _kernel_name(one: Instruction) -> str:
    scopes = one.op_name.split("/")
    return scopes[-2] if scopes[-1] == "pallas_call" and len(scopes) > 1 else re.sub(r"[.\d]+$", "", one.name)


PRODUCTS = {"fwd": 2, "dkv": 4, "dq": 3}
"""Matrix products [T, S] × H of attention kernels, by a part of their name: scores and mix; with the scores again, dV, dP, dK;
dP, dQ. The kernel that makes dK, dV and dQ at once has five."""


def kernel_flops(computation: Computation, one: Instruction) -> float | None:
    """By the kernel's own cost estimate, or for attention kernels by their shapes, half of the scores being masked; None
    where neither tells."""
    own = one.number(r'"?cost_estimate"?:\{[^}]*"?flops"?:"?(\d+)')
    if own:
        return float(own)
    name = (_kernel_name(one) + " " + one.op_name).lower()
    products = next((n for part, n in PRODUCTS.items() if part in name), None)
    if products is None or not ("attention" in name or "mha" in name or "mqa" in name or "splash" in name):
        return None
    arrays = [shape for n in one.operands if (shape := _shape_of(computation, n)).dtype in ("bf16", "f32")]
    arrays = [shape for shape in arrays if len(shape.dims) >= 3]
    if len(arrays) < 2:
        return None
    query, key = arrays[:2]
    if (
        "dkv" in name
        and sum(shape.dims[-2:] == key.dims[-2:] and len(shape.dims) >= len(key.dims) for shape in one.shapes) == 3
    ):
        products = 5
    return 2.0 * products * math.prod(query.dims) * key.dims[-2] / 2
