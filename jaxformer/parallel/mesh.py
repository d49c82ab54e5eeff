"""The update on a mesh: state born on its shards, rows and sequences spread, XLA's collectives in between."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxformer import processes
from jaxformer.config import ModelConfig
from jaxformer.nn import model
from jaxformer.parallel.data import Placement, put_rows, row_blocks
from jaxformer.sharding import ACTIVATIONS, ROWS, place, shardings

LETTERS = {"source": "BS", "source_valid": "BS"}
"""Of a batch's entries; all others are [B, T]."""


def state_shardings(state: Any, cfg: ModelConfig, mesh: Mesh) -> Any:
    """Of a (perhaps abstract) ``TrainState``: the optimizer's moments lie where their parameters do."""
    whole = NamedSharding(mesh, PartitionSpec())
    params = shardings(model.spec(cfg), cfg, mesh)
    paths = {tuple(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}

    def like_its_parameter(path, leaf):
        # Trees inside the optimizer's state that mirror the parameters' end in the same paths.
        ends = (paths.get(tuple(path[start:])) for start in range(len(path)))
        return next((found for found in ends if found is not None and leaf.ndim == len(found.spec)), whole)

    moments = jax.tree.map_with_path(like_its_parameter, state.opt_state)
    return dataclasses.replace(state, step=whole, params=params, opt_state=moments, key=whole)


def on_mesh(
    make_update: Callable[[str | None], Callable], abstract: Any, cfg: ModelConfig, mesh: Mesh, microbatches: int = 1
) -> Placement:
    """The placement of states of the shapes ``abstract``, and of batches for them. microbatches: those of the update."""
    where = state_shardings(abstract, cfg, mesh)
    whole = NamedSharding(mesh, PartitionSpec())
    step = jax.jit(make_update(None), donate_argnums=0, out_shardings=(where, whole))

    def put_batch(batch, microbatches=microbatches):
        own, count = row_blocks(mesh)
        sizes = {name: (len(x) * count // len(own), *x.shape[1:]) for name, x in batch.items()}  # of all processes together
        check_batch({name: jax.ShapeDtypeStruct(shape, batch[name].dtype) for name, shape in sizes.items()}, mesh, microbatches)
        placed = {name: place(LETTERS.get(name, "BT"), shape, ACTIVATIONS, mesh) for name, shape in sizes.items()}
        return put_rows(batch, {name: NamedSharding(mesh, spec) for name, spec in placed.items()}, own, count)

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
        put_state=lambda state: processes.put(state, where),
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
