"""The update on a mesh: state born on its shards, rows and sequences spread, XLA's collectives in between."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformer.config import ModelConfig
from jaxformer.nn import model
from jaxformer.parallel.data import Placement
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


def batch_shardings(batch: Any, mesh: Mesh) -> dict[str, NamedSharding]:
    """Of a (perhaps abstract) batch: rows and positions spread."""
    letters = {name: LETTERS.get(name, "BT") for name in batch}
    return {name: NamedSharding(mesh, place(letters[name], x.shape, ACTIVATIONS, mesh)) for name, x in batch.items()}


def jitted(update: Callable, where: Any, mesh: Mesh) -> Any:
    """``update`` of states that lie ``where``; their buffers are reused."""
    return jax.jit(update, donate_argnums=0, out_shardings=(where, NamedSharding(mesh, PartitionSpec())))


def on_mesh(make_update: Callable[[str | None], Callable], abstract: Any, cfg: ModelConfig, mesh: Mesh) -> Placement:
    """The placement of states of the shapes ``abstract``, and of batches for them."""
    where = state_shardings(abstract, cfg, mesh)
    step = jitted(make_update(None), where, mesh)

    def put_batch(batch):
        check_batch(batch, mesh)
        return jax.device_put(batch, batch_shardings(batch, mesh))

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
        put_state=lambda state: jax.device_put(state, where),
        begin=begin,
        like=like,
        get_state=lambda state: state,
        put_batch=put_batch,
        put_evaluation=put_batch,
        get_metrics=lambda metrics: {name: float(value) for name, value in metrics.items()},
        within=lambda: jax.set_mesh(mesh),
    )


def check_batch(batch: Any, mesh: Mesh) -> None:
    """Raises ValueError where rows or positions cannot be shared out evenly."""
    rows, length = batch["tokens"].shape
    for name, size, axes in (("batch_size", rows, ROWS), ("length", length, ("context",))):
        count = math.prod(mesh.shape[axis] for axis in axes)
        if size % count:
            near = -(-size // count) * count
            raise ValueError(f"{name}={size} does not divide by {count} devices ({', '.join(axes)}); the nearest is {near}")
