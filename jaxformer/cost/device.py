"""What one device of a mesh holds: shapes and bytes, by the tables of ``parallel.sharding``. The devices need not exist."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jaxformer.config import ModelConfig
from jaxformer.config.spec import Param
from jaxformer.parallel.sharding import AXES, PARAMETERS, MeshConfig, partition_spec

AnyMesh = MeshConfig | Mesh | AbstractMesh
Rules = dict[str, tuple[str, ...]]


def abstract_mesh(mesh: AnyMesh | None) -> AbstractMesh:
    """The mesh without its devices; data=0 is 1, and None one device. Raises ValueError for other meshes than ours."""
    if mesh is None or isinstance(mesh, MeshConfig):
        sizes = tuple(max(1, getattr(mesh, name, 1)) for name in AXES)
        return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"mesh must be a MeshConfig or a mesh of JAX, not {type(mesh).__name__}")
    if set(mesh.axis_names) != set(AXES):
        raise ValueError(f"mesh has the axes {', '.join(mesh.axis_names)}; it must have {', '.join(AXES)}")
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


def device_shape(letters: str, shape: tuple[int, ...], rules: Rules, mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
    """The shape that each device holds of a tensor."""
    return NamedSharding(mesh, partition_spec(letters, shape, rules, mesh)).shard_shape(shape)


def spread(spec: Any, cfg: ModelConfig, mesh: Mesh | AbstractMesh, rules: Rules = PARAMETERS, dtype: str | None = None) -> Any:
    """The tree of ``Param`` as shapes with dtypes (``dtype`` unless a parameter has its own) and shardings."""

    def sharded(param: Param) -> jax.ShapeDtypeStruct:
        shape = param.shape(cfg)
        sharding = NamedSharding(mesh, partition_spec(param.dims, shape, rules, mesh))
        return jax.ShapeDtypeStruct(shape, jnp.dtype(param.dtype or dtype or cfg.param_dtype), sharding=sharding)

    return jax.tree.map(sharded, spec, is_leaf=lambda leaf: isinstance(leaf, Param))


def device_bytes(tree: Any) -> int:
    """Bytes of a tree of shapes on one device, by the sharding of each; without one, all of it."""
    shapes = [(x, x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree)]
    return sum(math.prod(shape) * x.dtype.itemsize for x, shape in shapes)
