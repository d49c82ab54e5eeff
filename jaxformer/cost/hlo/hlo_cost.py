"""The work of one run of a program on one device: FLOPs of matrix products, estimated cycles, memory traffic."""

import math
import re
from dataclasses import dataclass, field

from jaxformer.cost.hlo.text import Computation, Instruction, Module, Shape

KERNELS = ("tpu_custom_call",)
"""Targets of the custom calls that are Pallas kernels, whose work XLA does not count."""
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "after-all"}
_FREE |= {"partition-id", "copy-done", "slice-done", "async-done", "async-update", "all-gather-done", "all-reduce-done"}
_FREE |= {"collective-permute-done", "iota", "opt-barrier"}


@dataclass
class Work:
    """Totals over the program; what stands in a loop counts as often as the loop runs."""

    flops: float = 0.0
    """Dots and convolutions, 2 per multiply-add, recomputation included."""
    kernel_flops: float = 0.0
    """Pallas kernels, by their own estimate or by the formula of attention; not part of ``flops``."""
    cycles: float = 0.0
    """The compiler's ``estimated_cycles``, which leave out Pallas kernels and collectives."""
    traffic: float = 0.0
    """Bytes between main memory and chip: operands and results of every instruction that runs by itself."""
    kernels: dict[str, float] = field(default_factory=dict)
    """How often each Pallas kernel runs."""
    unknown_kernels: set[str] = field(default_factory=set)
    unknown_loops: int = 0
    """Loops whose trip count is unknown; their bodies count once."""


def count(module: Module) -> Work:
    """The work of a program."""
    work = Work()
    for instruction, times in module.executed():
        work.flops += times * flops(instruction)
        work.cycles += times * (instruction.number(r'"estimated_cycles":"(\d+)"') or 0)
        work.traffic += times * traffic(instruction)
        work.unknown_loops += instruction.op == "while" and instruction.trip_count is None
        for kernel in filter(_is_kernel, [instruction, *(instruction.inner.instructions if instruction.inner else ())]):
            name = _kernel_name(kernel)
            work.kernels[name] = work.kernels.get(name, 0) + times
            if (counted := kernel_flops(kernel)) is None:
                work.unknown_kernels.add(name)
            else:
                work.kernel_flops += times * counted
    return work


def flops(instruction: Instruction) -> float:
    """FLOPs of one instruction with everything fused into it."""
    if instruction.op == "dot":
        return _dot(instruction)
    if instruction.op == "convolution":
        return _convolution(instruction)
    return sum(map(flops, instruction.inner.instructions)) if instruction.inner else 0.0


def _dot(instruction: Instruction) -> float:
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.text)
    axes = [int(n) for n in contracted[1].split(",") if n] if contracted else []
    return 2.0 * math.prod(instruction.shapes[0].dims) * math.prod(instruction.inputs[0].shapes[0].dims[axis] for axis in axes)


def _convolution(instruction: Instruction) -> float:
    """2 per multiply-add that meets an element of the input: neither its padding nor the holes of its dilation, which is how
    TPUs write products with batch dimensions."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.text)
    if not labels:
        return 0.0
    left, right, out = instruction.inputs[0].shapes[0].dims, instruction.inputs[1].shapes[0].dims, instruction.shapes[0].dims
    left_axes, right_axes, out_axes = ({letter: axis for axis, letter in enumerate(group)} for group in labels.groups())
    written = re.search(r"window=\{([^}]*)\}", instruction.text)
    window = {key: value.split("x") for key, value in re.findall(r"(\w+)=([\dx_\-]+)", written[1] if written else "")}
    pairs = 1
    for number, letter in enumerate(sorted(filter(str.isdigit, labels[1]))):
        stride, dilation, spread = (
            int(window[key][number]) if key in window else 1 for key in ("stride", "lhs_dilate", "rhs_dilate")
        )
        low = int(window["pad"][number].split("_")[0]) if "pad" in window else 0
        sizes = left[left_axes[letter]], right[right_axes[letter]], out[out_axes[letter]]
        pairs *= _valid(*sizes, stride, low, dilation, spread)
    features = right[right_axes["i"]] * out[out_axes["f"]]
    return 2.0 * pairs * features * left[left_axes["b"]] / (instruction.number(r"batch_group_count=(\d+)") or 1)


def _valid(size: int, window: int, out: int, stride: int, low: int, dilation: int, window_dilation: int) -> int:
    """How many pairs of an output and an offset in the window, along one axis, meet an element of the input."""
    end, pairs = (size - 1) * dilation, 0
    for offset in range(window):
        first = offset * window_dilation - low
        if dilation == 1:  # outputs with 0 <= first + stride·o <= end
            pairs += max(0, min(out - 1, (end - first) // stride) - max(0, -(first // stride)) + 1)
        else:
            at = (first + stride * o for o in range(out))
            pairs += sum(0 <= a <= end and a % dilation == 0 for a in at)
    return pairs


def traffic(instruction: Instruction) -> float:
    """Bytes that one instruction reads from main memory and writes to it. If it only slices an operand, the slice counts; if
    it updates one in place, the update."""
    if instruction.op in _FREE or (instruction.op == "custom-call" and not _is_kernel(instruction)):
        return 0.0
    if instruction.op in ("dynamic-slice", "slice", "gather"):
        return 2 * _bytes(instruction.shapes)
    if instruction.op == "dynamic-update-slice":
        return 2 * _bytes(instruction.inputs[1].shapes[:1])
    if instruction.op in ("copy-start", "slice-start", "async-start"):  # (to, from, …): one side is on the chip
        if instruction.inner and not instruction.inner.root.op.endswith(("slice", "copy")):
            return 0.0
        return min(shape.bytes for shape in instruction.shapes[:2]) * sum(shape.space == 0 for shape in instruction.shapes[:2])
    read = sum(_read(instruction.inner, number, source.shapes) for number, source in enumerate(instruction.inputs))
    return read + (_written(instruction.inner) if instruction.inner else _bytes(instruction.shapes))


def _read(inner: Computation | None, number: int, shapes: list[Shape]) -> float:
    """Bytes that an instruction reads of an operand, which is a parameter of the computation inside a fusion."""
    parameter = inner.parameters.get(number) if inner else None
    users = [user for user in inner.instructions if parameter.name in user.operands] if inner and parameter else []
    if users and all(user.op == "dynamic-slice" for user in users):
        return min(_bytes(shapes), sum(user.shapes[0].bytes for user in users))
    if users and all(user.op == "dynamic-update-slice" and user.operands[0] == parameter.name for user in users):  # type: ignore
        return 0.0
    return _bytes(shapes)


def _written(inner: Computation) -> float:
    total = 0.0
    for output in inner.root.inputs if inner.root.op == "tuple" else [inner.root]:
        while output.op == "bitcast":
            output = output.inputs[0]
        in_place = output.op == "dynamic-update-slice" and _bytes(output.shapes)
        total += output.inputs[1].shapes[0].bytes if in_place else _bytes(output.shapes)
    return total


def _bytes(shapes: list[Shape]) -> float:
    return sum(shape.bytes for shape in shapes if shape.space == 0)


# Pallas kernels


def _is_kernel(instruction: Instruction) -> bool:
    target = re.search(r'custom_call_target="([^"]*)"', instruction.text) if instruction.op == "custom-call" else None
    return target is not None and target[1] in KERNELS


def _kernel_name(instruction: Instruction) -> str:
    scopes = instruction.op_name.split("/")
    return scopes[-2] if scopes[-1] == "pallas_call" and len(scopes) > 1 else re.sub(r"[.\d]+$", "", instruction.name)


PRODUCTS = {"fwd": 2, "dkv": 4, "dq": 3}
"""Matrix products [T, S] × H of attention kernels, by a part of their name. fwd: scores and mix. dkv: the scores again, dV, dP
and dK. dq: the scores again, dP and dQ. A kernel that computes dK, dV and dQ together makes five."""


def kernel_flops(instruction: Instruction) -> float | None:
    """By the kernel's own cost estimate, or for an attention kernel by its shapes with half of the scores masked; None if
    neither is known."""
    if estimate := instruction.number(r'"?cost_estimate"?:\{[^}]*"?flops"?:"?(\d+)'):
        return float(estimate)
    name = (_kernel_name(instruction) + " " + instruction.op_name).lower()
    products = next((n for word, n in PRODUCTS.items() if word in name), None)
    arrays = [shape for source in instruction.inputs for shape in source.shapes[:1] if shape.dtype in ("bf16", "f32")]
    arrays = [shape for shape in arrays if len(shape.dims) >= 3]
    if products is None or len(arrays) < 2 or not any(word in name for word in ("attention", "mha", "mqa", "splash")):
        return None
    query, key = arrays[:2]
    gradients = [shape for shape in instruction.shapes if shape.dims[-2:] == key.dims[-2:] and len(shape.dims) >= len(key.dims)]
    if "dkv" in name and len(gradients) == 3:
        products = 5
    return 2.0 * products * math.prod(query.dims) * key.dims[-2] / 2
