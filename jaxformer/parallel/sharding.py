"""Where tensors lie on many devices: a mesh, and two short tables over the letters of the dimension key.

A letter goes to the first axes of its row that are free in the tensor and divide its size. What finds none is replicated, and
``table`` shows it.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxformer.config import ModelConfig
from jaxformer.config.spec import Param, walk
from jaxformer.config.strict import Strict, within

AXES = ("data", "fsdp", "expert", "context", "tensor")
ROWS = ("data", "fsdp", "expert")
"""The axes that a batch's rows are spread over."""
PARAMETERS: dict[str, tuple[str, ...]] = {
    "E": ("expert",),
    "K": ("tensor",),
    "G": ("tensor",),
    "F": ("tensor",),
    "V": ("tensor",),
    "D": ("fsdp",),
    "R": ("fsdp",),
    "Q": ("fsdp",),
}
ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "B": ROWS,
    "T": ("context",),
    "K": ("tensor",),
    "G": ("tensor",),
    "F": ("tensor",),
    "V": ("tensor",),
}


@dataclass(frozen=True)
class MeshConfig(Strict):
    """How many devices there are along each axis of the mesh."""

    data: int = 0
    """Number of copies of the model, each of which computes different rows. 0: as many as the other axes leave."""
    fsdp: int = 1
    """Number of devices that the parameters and optimizer state of a copy, and rows, are spread over."""
    expert: int = 1
    """Number of devices that experts, and rows, are spread over."""
    context: int = 1
    """Number of devices that each sequence is spread over."""
    tensor: int = 1
    """Number of devices that heads, feed-forward width and vocabulary are spread over."""
    slices: int = 1
    """Number of groups of devices that only a slow network joins: TPU slices, or machines. Only the data axis crosses it."""
    offload: bool = False
    """Keep the optimizer's state in host memory between updates."""

    def __post_init__(self):
        super().__post_init__()
        within(self, 0, math.inf, "data", prefix="mesh.")
        within(self, 1, math.inf, *AXES[1:], "slices", prefix="mesh.")
        if self.data % self.slices:
            near = -(-self.data // self.slices) * self.slices
            raise ValueError(f"mesh.data={self.data} is not a multiple of mesh.slices={self.slices}; the nearest is {near}")

    def make(self, devices: list | None = None) -> Mesh:
        """The mesh, its slices outermost along data; within a slice of TPUs, neighbours lie as their links do.

        Raises ValueError where the devices are not a multiple of its axes, or of the number of slices.
        """
        devices = jax.devices() if devices is None else devices
        per_copy = math.prod(getattr(self, name) for name in AXES[1:])
        data = self.data or max(1, len(devices) // per_copy)
        if data * per_copy != len(devices):
            sizes = " · ".join(f"{name} {getattr(self, name)}" for name in AXES if getattr(self, name) > 1) or "data 1"
            on_cpu = devices[0].platform == "cpu"
            simulate = f"; XLA_FLAGS=--xla_force_host_platform_device_count={per_copy} simulates them on CPUs" if on_cpu else ""
            there = f"{len(devices)} device{'s' * (len(devices) > 1)}"
            raise ValueError(f"a mesh of {sizes} does not fit {there}{simulate}")
        if data % self.slices:
            raise ValueError(f"{data} devices along data cannot be split into mesh.slices={self.slices} equal groups")
        shape = (data // self.slices, *(getattr(self, name) for name in AXES[1:]))
        ordered = np.concatenate([_ordered(shape, group) for group in _slices(devices, self.slices)])
        return Mesh(ordered, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _slices(devices: list, count: int) -> list[list]:
    """The devices of each slice: TPUs know theirs; of others, each process is one. All slices have equally many."""
    known = devices[0].platform == "tpu"
    number = [(getattr(device, "slice_index", None) or 0) if known else device.process_index for device in devices]
    groups = sorted(set(number))
    if known and len(groups) != count:
        raise ValueError(f"these devices belong to {len(groups)} slices; set mesh.slices={len(groups)}, not {count}")
    if len(groups) % count and count > 1:
        raise ValueError(f"mesh.slices={count} does not fit devices of {len(groups)} processes")
    slice_of = {index: at * count // len(groups) for at, index in enumerate(groups)}
    slices = [[d for d, index in zip(devices, number, strict=True) if slice_of[index] == at] for at in range(count)]
    if len(set(map(len, slices))) > 1:
        raise ValueError(f"mesh.slices needs equal slices, but they have {', '.join(str(len(s)) for s in slices)} devices")
    return slices


def _ordered(shape: tuple[int, ...], devices: list) -> np.ndarray:
    if devices[0].platform == "tpu":
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return np.asarray(devices).reshape(shape)


def partition_spec(
    letters: str, shape: tuple[int, ...], rules: dict[str, tuple[str, ...]], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """The axes of the mesh that each axis of a tensor is spread over."""
    used: set[str] = set()
    entries: list[Any] = []
    for letter, size in zip(letters, shape, strict=True):
        axes: list[str] = []
        for axis in rules.get(letter, ()):
            many = mesh.shape[axis]
            if many > 1 and axis not in used and size % (many * math.prod(mesh.shape[name] for name in axes)) == 0:
                axes.append(axis)
        used.update(axes)
        entries.append(tuple(axes) if len(axes) > 1 else axes[0] if axes else None)
    return PartitionSpec(*entries)


def shardings(spec: Any, cfg: ModelConfig, mesh: Mesh) -> Any:
    """The ``NamedSharding`` of every parameter of a tree of ``Param``."""

    def sharding(param: Param) -> NamedSharding:
        return NamedSharding(mesh, partition_spec(param.dims, param.shape(cfg), PARAMETERS, mesh))

    return jax.tree.map(sharding, spec, is_leaf=lambda leaf: isinstance(leaf, Param))


def in_use() -> dict[str, tuple[str, ...]]:
    """``PARAMETERS`` of weights that are brought together to be used."""
    return {letter: tuple(axis for axis in axes if axis != "fsdp") for letter, axes in PARAMETERS.items()}


def constrain(x: jax.Array, letters: str) -> jax.Array:
    """An activation, where the table puts it on the mesh that is set (``jax.set_mesh``); as it is without one of ours."""
    return _constrain(x, letters, ACTIVATIONS)


def gathered(weight: jax.Array, letters: str) -> jax.Array:
    """A weight as it is used: what lies on fsdp is brought together, by this constraint and not by XLA's choice, which may be
    to move activations instead."""
    return _constrain(weight, letters, in_use())


def _constrain(x: jax.Array, letters: str, rules: dict[str, tuple[str, ...]]) -> jax.Array:
    mesh = current()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, partition_spec(letters, x.shape, rules, mesh))


def current() -> AbstractMesh | None:
    """The mesh that is set, if it is one of ours and XLA spreads the program over it: not inside ``shard_map``."""
    mesh = jax.sharding.get_abstract_mesh()
    ours = not mesh.empty and set(mesh.axis_names) == set(AXES) and all(kind == AxisType.Auto for kind in mesh.axis_types)
    return mesh if ours else None


def platform() -> str:
    """What the program that is being traced is for, as far as is known: the devices of the mesh that is set, which need not be
    of this process (a topology to compile for); without one, JAX's default. "cpu", "gpu" or "tpu"."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name


def partitioned() -> bool:
    """Whether XLA may spread the program that is being traced over several devices: not where each device runs its
    own program, as inside ``shard_map`` and ``pmap``."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() > 1 if mesh.empty else mesh.size > 1 and not mesh.are_all_axes_manual


def table(spec: Any, cfg: ModelConfig, mesh: Mesh) -> list[tuple[str, str, str, str]]:
    """``(path, letters, shape, placement)`` of every parameter, those that no axis takes last, the largest first."""
    rows = []
    for path, param in walk(spec):
        shape = param.shape(cfg)
        spec_of_axes = partition_spec(param.dims, shape, PARAMETERS, mesh)
        axes = [f"{letter}: {axis}" for letter, axis in zip(param.dims, spec_of_axes, strict=True) if axis is not None]
        rows.append((not axes, -math.prod(shape), (path, param.dims, str(list(shape)), ", ".join(axes) or "replicated")))
    return [row for _, _, row in sorted(rows)]
