"""How training state and batches live on devices: the state copied to each (``jit``, ``pmap``), or its tensors spread over a
mesh (``mesh``). The rows of a batch are always spread.

The numbers are the same in all three ways, up to the masks of dropout. With several processes, each holds the rows of a batch
that its own devices need (``own_rows``).
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxformer.parallel import multihost
from jaxformer.parallel.sharding import ACTIVATIONS, ROWS, MeshConfig, partition_spec

AXIS = "devices"
"""The name of the axis that ``pmap`` maps over."""
HOST = "pinned_host"
"""JAX's name of the host memory that devices reach."""
LETTERS = dict.fromkeys(("tokens", "targets", "weights", "segments", "positions", "valid", "token_types"), "BT")
LETTERS |= {"embeddings": "BTD", "embeddings_mask": "BT"}
"""The dimensions of the batch entries that the library itself reads, as far as they can be spread."""

Update = Callable[[Any, Any], tuple[Any, Any]]
"""``(state, batch) -> (state, metrics)``, as ``training.make_update`` makes it."""


@dataclass(frozen=True)
class Placement:
    """A compiled update, and how to bring its state and batches to the devices and back."""

    step: Update
    """The compiled update. It reuses the buffers of the state it is given: use the state that it returns."""
    begin: Callable[..., Any]
    """``begin(make, *arguments)``: the state ``make(*arguments)`` on the devices."""
    like: Callable[[Any], Any]
    """From an abstract state (of ``jax.eval_shape``), what ``Checkpoints.restore`` takes: shapes that say on which devices each
    tensor is to be restored."""
    put_state: Callable[[Any], Any]
    """A restored state, or one that is not on the devices yet, as ``step`` takes it."""
    get_state: Callable[[Any], Any]
    """The state as one device has it, for ``Checkpoints.save`` and for evaluation."""
    put_batch: Callable[[Any], Any]
    """A batch (with several processes, this one's ``own_rows``) as ``step`` takes it. Raises ValueError where its rows cannot
    be shared out evenly."""
    put_evaluation: Callable[[Any], Any]
    """A batch as a function that ``compile`` made takes it."""
    get_metrics: Callable[[Any], dict[str, float]]
    """The metrics of ``step`` as floats; waits for them."""
    compile: Callable[[Callable], Callable] = jax.jit
    """Compiles a function of ``get_state(state)`` and batches; every process gets its results whole."""
    within: Callable[[], AbstractContextManager] = contextlib.nullcontext
    """The context that everything else that computes with the state needs."""


def jit(update: Update, devices: list | None = None) -> Placement:
    """The state copied to each of ``devices`` (all unless given), the rows spread over them; XLA adds the sums over devices."""
    mesh = MeshConfig().make(devices)
    replicated = NamedSharding(mesh, PartitionSpec())
    begin = lambda make, *arguments: multihost.put(make(*arguments), replicated)
    return _sharded(update, replicated, mesh, begin, {})


def pmap(update: Update, devices: list | None = None) -> Placement:
    """The state copied to each of ``devices`` (all unless given), each running the update on its own rows and adding up sums
    with ``over_devices``. Raises ValueError with several processes."""
    if jax.process_count() > 1:
        raise ValueError("train.parallel='pmap' works in one process only; use jit, the default, with several")
    devices = devices or jax.local_devices()
    count = len(devices)
    by_device = NamedSharding(Mesh(np.asarray(devices), (AXIS,)), PartitionSpec(AXIS))  # where pmap puts its results

    def put_state(state):
        return jax.device_put(jax.tree.map(lambda x: jax.numpy.stack([x] * count), state), by_device)

    def put_batch(batch):
        _check_divides("batch_size", row_count(batch), count)
        return jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)

    return Placement(
        step=jax.pmap(update, axis_name=AXIS, devices=devices, donate_argnums=0),
        begin=lambda make, *arguments: put_state(make(*arguments)),
        like=lambda state: state,
        put_state=put_state,
        get_state=lambda state: jax.tree.map(lambda x: x.addressable_data(0)[0], state),
        put_batch=put_batch,
        put_evaluation=lambda batch: batch,
        get_metrics=lambda metrics: {name: float(value[0]) for name, value in metrics.items()},
    )


def mesh(
    update: Update, state: Any, params: Any, *, letters: Mapping[str, str] | None = None, offload: bool = False
) -> Placement:
    """Tensors spread over a mesh, rows over its axes ``ROWS``, sequences over ``context``.

    state: a (perhaps abstract) state with the fields ``params`` and ``opt_state``. params: a ``NamedSharding`` for every
    parameter (``training.param_shardings``). letters: the dimensions of batch entries beyond ``LETTERS``, such as
    ``{"chosen": "BT"}``; an entry without letters is spread by rows alone. offload: see ``MeshConfig``.
    """
    where = state_shardings(state, params, offload)
    on = jax.tree.leaves(params)[0].mesh

    def begin(make, *arguments):
        """Every tensor is made on its own shards: no device ever holds all of it."""
        with jax.set_mesh(on):
            return jax.jit(make, out_shardings=where)(*arguments)

    return _sharded(update, where, on, begin, letters or {})


PLACEMENTS = {"jit": jit, "pmap": pmap}
"""The placements that copy the state, by the names of ``train.parallel``."""


def _sharded(update: Update, where: Any, mesh: Mesh, begin: Callable[..., Any], letters: Mapping[str, str]) -> Placement:
    """The placement of states that lie ``where``: one sharding for all tensors, or a tree of them."""
    step = jitted(update, where, mesh)
    replicated = NamedSharding(mesh, PartitionSpec())
    # Programs for one device need no mesh; on several, kernels that XLA cannot partition read the mesh that is set.
    within = (lambda: jax.set_mesh(mesh)) if mesh.size > 1 else contextlib.nullcontext

    def put_batch(batch):
        blocks, count = row_blocks(mesh)
        row_count(batch)
        sizes = {name: (len(x) * count // len(blocks), *x.shape[1:]) for name, x in batch.items()}  # over all processes
        abstract = {name: jax.ShapeDtypeStruct(shape, batch[name].dtype) for name, shape in sizes.items()}
        check_batch(abstract, mesh, letters=letters)
        return put_rows(batch, batch_shardings(abstract, mesh, letters), blocks, count)

    @functools.wraps(step)
    def run(state, batch):
        with within():
            return step(state, batch)

    def like(state):
        shardings = jax.tree.map(lambda _: where, state) if isinstance(where, NamedSharding) else where
        return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), state, shardings)

    return Placement(
        step=run,
        begin=begin,
        like=like,
        put_state=lambda state: multihost.put(state, where),
        get_state=lambda state: state,
        put_batch=put_batch,
        put_evaluation=put_batch,
        get_metrics=lambda metrics: {name: float(value) for name, value in metrics.items()},
        compile=lambda function: jax.jit(function, out_shardings=replicated),
        within=within,
    )


def jitted(update: Update, where: Any, mesh: Mesh) -> Any:
    """``update`` compiled for states that lie ``where``; their buffers are reused. Tensors in host memory are brought to the
    device for the update."""
    in_host = [at.memory_kind == HOST for at in jax.tree.leaves(where)]

    def fetched(state, batch):
        leaves, tree = jax.tree.flatten(state)
        pairs = zip(leaves, jax.tree.leaves(where), in_host, strict=True)
        on_device = [jax.device_put(x, at.with_memory_kind("device")) if far else x for x, at, far in pairs]
        return update(jax.tree.unflatten(tree, on_device), batch)

    step = fetched if any(in_host) else update
    return jax.jit(step, donate_argnums=0, out_shardings=(where, NamedSharding(mesh, PartitionSpec())))


def state_shardings(state: Any, params: Any, offload: bool = False) -> Any:
    """The ``NamedSharding`` of every tensor of a (perhaps abstract) state, given those of its parameters: a tensor of the shape
    of a parameter, at the same path in some tree of the state, lies where the parameter lies; all others are replicated.

    offload: keeps ``opt_state`` in host memory; raises ValueError where the devices reach none.
    """
    first = jax.tree.leaves(params)[0]
    replicated = NamedSharding(first.mesh, PartitionSpec())
    pairs = zip(jax.tree.leaves_with_path(state.params), jax.tree.leaves(params), strict=True)
    by_path = {tuple(path): (x.shape, at) for (path, x), at in pairs}

    def like_its_parameter(path, x):
        ends = (by_path.get(tuple(path[start:])) for start in range(len(path)))
        return next((end[1] for end in ends if end is not None and end[0] == x.shape), replicated)

    where = jax.tree.map_with_path(like_its_parameter, state)
    if not offload:
        return where
    device = first.mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise ValueError(f"mesh.offload needs {HOST} memory; a {device.device_kind} has {', '.join(kinds)}")
    in_host = lambda at, x: at.with_memory_kind(HOST) if x.ndim else at
    return dataclasses.replace(where, opt_state=jax.tree.map(in_host, where.opt_state, state.opt_state))


# Batches


def batch_shardings(batch: Any, mesh: Mesh, letters: Mapping[str, str] | None = None) -> dict[str, NamedSharding]:
    """The sharding of every entry of a (perhaps abstract) batch."""
    known = LETTERS | dict(letters or {})

    def sharding(name: str, shape: tuple[int, ...]) -> NamedSharding:
        dims = known.get(name, "B").ljust(len(shape), "-")  # "-": not spread
        return NamedSharding(mesh, partition_spec(dims, shape, ACTIVATIONS, mesh))

    return {name: sharding(name, x.shape) for name, x in batch.items()}


def check_batch(batch: Any, mesh: Mesh | AbstractMesh, microbatches: int = 1, letters: Mapping[str, str] | None = None) -> None:
    """Raises ValueError where the rows of a (perhaps abstract) batch, or of each of its microbatches, or the positions of an
    entry with the letter T cannot be shared out evenly."""
    rows = math.prod(mesh.shape[axis] for axis in ROWS)
    _check_divides("batch_size", row_count(batch), rows, microbatches)
    known = LETTERS | dict(letters or {})
    for name, x in batch.items():
        if "T" in known.get(name, ""):
            _check_divides("length", x.shape[known[name].index("T")], mesh.shape["context"], axis=" along context")


def _check_divides(name: str, size: int, count: int, parts: int = 1, axis: str = "") -> None:
    if size % (count * parts):
        nearest = -(-size // (count * parts)) * count * parts
        each = f" in {parts} microbatches" if parts > 1 else ""
        raise ValueError(f"{name}={size}{each} is not divisible by {count} devices{axis}; the nearest is {nearest}")


def row_count(batch: Any) -> int:
    """The rows of a batch: the size of the first axis of all its arrays. Raises ValueError where that is not one size."""
    sizes = {name: np.shape(x)[:1] for name, x in batch.items()}
    if len(set(sizes.values())) != 1 or () in sizes.values():
        shown = ", ".join(f"{name}: {size[0] if size else 'no axis'}" for name, size in sizes.items())
        raise ValueError(f"the first axis of every batch entry must be the rows, of the same number; it is {shown or 'empty'}")
    return next(iter(sizes.values()))[0]


def row_blocks(mesh: Mesh) -> tuple[list[int], int]:
    """The numbers of the blocks of rows that this process's devices hold, and into how many blocks ``mesh`` cuts a batch."""
    axes = [mesh.shape[name] if name in ROWS else 1 for name in mesh.axis_names]
    count = math.prod(axes)
    block = np.broadcast_to(np.arange(count).reshape(axes), mesh.devices.shape)
    held = [number for number, device in zip(block.flat, mesh.devices.flat, strict=True) if device in mesh.local_devices]
    return sorted(set(map(int, held))), count


def own_rows(mesh: Mesh, rows: int) -> np.ndarray | slice:
    """The numbers of the rows, in a batch of ``rows``, that this process needs. Raises ValueError if rows cannot be shared out
    evenly."""
    blocks, count = row_blocks(mesh)
    if len(blocks) == count:
        return slice(None)
    _check_divides("batch_size", rows, count)
    return np.concatenate([np.arange(rows)[number * rows // count :][: rows // count] for number in blocks])


def put_rows(batch: Any, shardings: dict[str, NamedSharding], blocks: list[int], count: int) -> dict[str, jax.Array]:
    """A batch on the devices of all processes, from this process's rows: those of ``blocks``, of ``count`` in all."""
    if jax.process_count() == 1:
        return jax.device_put(batch, shardings)

    def put(x, sharding):
        size, *rest = x.shape
        size //= len(blocks)

        def rows_of(index):
            at = blocks.index((index[0].start or 0) // size) * size
            return x[(slice(at, at + size), *index[1:])]

        return jax.make_array_from_callback((size * count, *rest), sharding, rows_of)

    return {name: put(np.asarray(x), shardings[name]) for name, x in batch.items()}


# Inside an update


def over_devices(tree: Any) -> Any:
    """Inside ``pmap``, the sum of ``tree`` over the devices; elsewhere ``tree`` itself, as XLA adds up what it has spread."""
    return tree if _device_number() is None else jax.lax.psum(tree, AXIS)


def own_key(key: jax.Array) -> jax.Array:
    """Inside ``pmap``, a key for each device; elsewhere ``key`` itself."""
    number = _device_number()
    return key if number is None else jax.random.fold_in(key, number)


def _device_number() -> jax.Array | None:
    try:
        return jax.lax.axis_index(AXIS)
    except NameError:  # no pmap of ours around this
        return None
