"""Accelerators: what one chip can do, and how many of them are connected in which shape.

Peaks are for dense bfloat16. Sources: Google Cloud's pages "TPU v5e", "TPU v5p" and "TPU v6e" (peak, bandwidths); NVIDIA's data
sheets of the A100, H100, H200 and B200, SXM (dense is half of the printed figure with sparsity). The HBM of a TPU is what
libtpu lets a program use, as it says when one does not fit; a GPU's is all it has.
"""

import math
import os
import re
from dataclasses import dataclass
from typing import Any

from jaxformer.config.components import nearest

GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """One accelerator."""

    name: str
    peak: float
    """FLOP/s, dense bfloat16."""
    hbm: float
    """Bytes of memory that a program may use."""
    bandwidth: float
    """Bytes/s between memory and chip."""
    link: float
    """Bytes/s in one direction: of one link to a neighbor (TPU), or of all links together (GPU)."""
    axes: int = 0
    """Dimensions of the torus; 0: a switch connects all chips of a host."""
    clock: float = 0.0
    """Cycles/s that give the peak."""
    outside: float = 0.0
    """GPU: bytes/s in one direction to other hosts, assuming a network of 400 Gbit/s per GPU."""


def _tpu(name: str, peak: float, hbm: float, bandwidth: float, link: float, axes: int, multiplies: int) -> Chip:
    """multiplies: multiply-adds per cycle, over all matrix units of the chip."""
    return Chip(name, peak * 1e12, hbm * GIB, bandwidth * 1e9, link * 1e9, axes, peak * 1e12 / (2 * multiplies))


def _gpu(name: str, peak: float, hbm: float, bandwidth: float, link: float) -> Chip:
    return Chip(name, peak * 1e12, hbm * 1e9, bandwidth * 1e9, link * 1e9, outside=50e9)


TPUS = {
    "v5e": _tpu("TPU v5e", 197, 15.75, 819, 50, axes=2, multiplies=4 * 128**2),
    "v5p": _tpu("TPU v5p", 459, 95.73, 2765, 100, axes=3, multiplies=8 * 128**2),
    "v6e": _tpu("TPU v6e", 918, 31.24, 1640, 100, axes=2, multiplies=4 * 256**2),
}
GPUS = {
    "A100": _gpu("A100 80 GB", 312, 80, 2039, 300),
    "H100": _gpu("H100 80 GB", 989.4, 80, 3350, 450),
    "H200": _gpu("H200", 989.4, 141, 4800, 450),
    "B200": _gpu("B200", 2250, 180, 7700, 900),
}
KINDS = {"TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e", "TPU v6e": "v6e"}
"""``device_kind`` of JAX for the TPUs of the table."""


def peak_of(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device by JAX's name for it; None if unknown, as for CPUs and slower forms (PCIe, NVL)."""
    if device_kind in KINDS:
        return TPUS[KINDS[device_kind]].peak
    words = device_kind.replace("-", " ").split()
    if words[:1] != ["NVIDIA"] or {"PCIe", "PCIE", "NVL", "MIG"} & set(words):
        return None
    return next((chip.peak for name, chip in GPUS.items() if name in words), None)


SPELLED = {"v5": "v5p", "v5litepod": "v5e", "v6": "v6e"}
HOST = 8
"""GPUs per host."""


@dataclass(frozen=True)
class Topology:
    """A number of chips of one kind. ``shape`` is the torus, or (count,) for GPUs."""

    text: str
    chip: Chip
    shape: tuple[int, ...]
    is_tpu: bool

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def parse(text: str) -> Topology:
    """``v5e:4x4``, ``v5p:4x4x4``, ``gpu:8xH200``. Raises ValueError for anything else, with the nearest topology."""
    head, _, rest = text.partition(":")
    if head == "gpu":
        gpus = re.fullmatch(r"(\d+)x(\w+)", rest)
        if not gpus or int(gpus[1]) < 1:
            raise ValueError(f"topology {text!r}: GPUs are written gpu:8xH200 ({', '.join(GPUS)})")
        name = next((known for known in GPUS if known.lower() == gpus[2].lower()), None)
        if name is None:
            raise ValueError(f"topology {text!r}: unknown GPU {gpus[2]!r}{nearest(gpus[2], GPUS)}")
        return Topology(f"gpu:{gpus[1]}x{name}", GPUS[name], (int(gpus[1]),), False)
    name = SPELLED.get(head, head)
    if name not in TPUS:
        raise ValueError(f"topology {text!r}: unknown chip {head!r}{nearest(head, [*TPUS, 'gpu'])}")
    chip = TPUS[name]
    if not re.fullmatch(r"\d+(x\d+)*", rest):
        raise ValueError(f"topology {text!r}: write the torus of chips, such as {name}:{'x'.join('4' * chip.axes)}")
    shape = tuple(map(int, rest.split("x")))
    if len(shape) != chip.axes or any(side < 1 or (side > 2 and side % 2) for side in shape):
        near = tuple(max(1, side + (side > 2 and side % 2)) for side in (*shape, 1, 1)[: chip.axes])
        raise ValueError(
            f"topology {text!r}: {name} is a torus of {chip.axes} dimensions with even sides; the nearest is "
            f"{name}:{'x'.join(map(str, near))}"
        )
    return Topology(f"{name}:{rest}", chip, shape, True)


def devices(topology: Topology) -> list[Any]:
    """The devices of a TPU topology, only to compile for. Raises ValueError if libtpu is missing or refuses the shape."""
    from jax.experimental import topologies

    # No metadata server of a cloud is queried, no host is searched for, and other processes may compile meanwhile.
    chip = topology.text.partition(":")[0]
    settings = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    for name, value in (settings | {"TPU_ACCELERATOR_TYPE": f"{chip}-{topology.count}"}).items():
        os.environ.setdefault(name, value)
    name = f"{chip}:{'x'.join(map(str, topology.shape))}"
    # A host has 2 × 2 chips by default.
    options: dict[str, Any] = {"chips_per_host_bounds": [*topology.shape, 1][:3]} if 1 in topology.shape[:2] else {}
    try:
        chips = list(topologies.get_topology_desc(name, "tpu", **options).devices)
    except RuntimeError as error:
        if "not installed" in str(error):
            raise ValueError(
                f"compiling for {topology.text} needs libtpu, but no TPU; pip install 'jaxformer[plan]'; "
                "plans for gpu:8xH200 and the like are computed and need nothing"
            ) from error
        raise ValueError(f"topology {topology.text!r}: {error}") from error
    if len(chips) != topology.count:
        raise ValueError(f"{topology.text} has {topology.count} chips, but libtpu makes {len(chips)} devices")
    return chips
