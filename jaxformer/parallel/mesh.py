"""The update on a mesh: state born on its shards, rows and sequences spread, XLA's collectives in between."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxformer.config import ModelConfig
from jaxformer.nn import model
from jaxformer.parallel import multihost
from jaxformer.parallel.placement import Placement, put_rows, row_blocks
from jaxformer.parallel.sharding import ACTIVATIONS, ROWS, partition_spec, shardings

HOST = "pinned_host"
"""JAX's name of the memory of hosts that devices reach."""
LETTERS = {"source": "BS", "source_valid": "BS"}
"""Of a batch's entries; all others are [B, T]."""


def state_shardings(state: Any, cfg: ModelConfig, mesh: Mesh, offload: bool = False) -> Any:
    """Of a (perhaps abstract) ``TrainState``: the optimizer's moments lie where their parameters do; offload: in their hosts'
    memory. Raises ValueError where the devices' hosts have none that they could reach."""
    whole = NamedSharding(mesh, PartitionSpec())
    params = shardings(model.spec(cfg), cfg, mesh)
    paths = {tuple(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}

    def like_its_parameter(path, leaf):
        # Trees inside the optimizer's state that mirror the parameters' end in the same paths.
        ends = (paths.get(tuple(path[start:])) for start in range(len(path)))
        return next((found for found in ends if found is not None and leaf.ndim == len(found.spec)), whole)

    moments = jax.tree.map_with_path(like_its_parameter, state.opt_state)
    if offload:
        kinds = [memory.kind for memory in mesh.devices.flat[0].addressable_memories()]
        if HOST not in kinds:
            raise ValueError(f"mesh.offload needs {HOST} memory; a {mesh.devices.flat[0].device_kind} has {', '.join(kinds)}")
        moments = jax.tree.map(lambda at, x: at.with_memory_kind(HOST) if x.ndim else at, moments, state.opt_state)
    return dataclasses.replace(state, step=whole, params=params, opt_state=moments, key=whole)


def batch_shardings(batch: Any, mesh: Mesh) -> dict[str, NamedSharding]:
    """Of a (perhaps abstract) batch: rows and positions spread."""
    letters = {name: LETTERS.get(name, "BT") for name in batch}
    return {name: NamedSharding(mesh, partition_spec(letters[name], x.shape, ACTIVATIONS, mesh)) for name, x in batch.items()}


def jitted(update: Callable, where: Any, mesh: Mesh) -> Any:
    """``update`` of states that lie ``where``; their buffers are reused. What lies in a host's memory comes and goes."""
    away = [at.memory_kind == HOST for at in jax.tree.leaves(where)]

    def fetched(state, batch):
        leaves, tree = jax.tree.flatten(state)
        ends = zip(leaves, jax.tree.leaves(where), away, strict=True)
        near = [jax.device_put(x, at.with_memory_kind("device")) if far else x for x, at, far in ends]
        return update(jax.tree.unflatten(tree, near), batch)

    step = fetched if any(away) else update
    return jax.jit(step, donate_argnums=0, out_shardings=(where, NamedSharding(mesh, PartitionSpec())))


def on_mesh(
    make_update: Callable[[str | None], Callable],
    abstract: Any,
    cfg: ModelConfig,
    mesh: Mesh,
    microbatches: int = 1,
    offload: bool = False,
) -> Placement:
    """The placement of states of the shapes ``abstract``, and of batches for them. microbatches: those of the update;
    offload: see ``MeshConfig``."""
    where = state_shardings(abstract, cfg, mesh, offload)
    step = jitted(make_update(None), where, mesh)
    whole = NamedSharding(mesh, PartitionSpec())

    def put_batch(batch, microbatches=microbatches):
        own, count = row_blocks(mesh)
        sizes = {name: (len(x) * count // len(own), *x.shape[1:]) for name, x in batch.items()}  # of all processes together
        abstract = {name: jax.ShapeDtypeStruct(shape, batch[name].dtype) for name, shape in sizes.items()}
        check_batch(abstract, mesh, microbatches)
        return put_rows(batch, batch_shardings(abstract, mesh), own, count)

    def begin(fresh, params=None):
        """Each tensor is made on its shards: no device ever holds the whole."""
        with jax.set_mesh(mesh):
            if params is None:
                return jax.jit(fresh, out_shardings=where)()
            return jax.jit(lambda params: fresh(params=params), out_shardings=where)(params)

    def run(state, batch):
        with jax.set_mesh(mesh):
            return step(state, batch)

    def like(state):
        return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), state, where)

    return Placement(
        step=run,
        put_state=lambda state: multihost.put(state, where),
        begin=begin,
        like=like,
        get_state=lambda state: state,
        put_batch=put_batch,
        put_evaluation=functools.partial(put_batch, microbatches=1),
        get_metrics=lambda metrics: {name: float(value) for name, value in metrics.items()},
        compile=lambda function: jax.jit(function, out_shardings=whole),
        within=lambda: jax.set_mesh(mesh),
    )


def check_batch(batch: Any, mesh: Mesh | AbstractMesh, microbatches: int = 1) -> None:
    """Raises ValueError where rows, of each microbatch too, or positions cannot be shared out evenly."""
    rows, length = batch["tokens"].shape
    parts = f" in {microbatches} microbatches" if microbatches > 1 else ""
    for name, size, axes, each in (("batch_size", rows, ROWS, microbatches), ("length", length, ("context",), 1)):
        count = math.prod(mesh.shape[axis] for axis in axes)
        if size % (count * each):
            near = -(-size // (count * each)) * count * each
            what = f"{name}={size}{parts if each > 1 else ''}"
            raise ValueError(f"{what} does not divide by {count} devices ({', '.join(axes)}); the nearest is {near}")
