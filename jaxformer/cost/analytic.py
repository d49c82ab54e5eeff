"""Plans by arithmetic, for chips that nothing here compiles for."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxformer.config import ModelConfig
from jaxformer.cost import model_flops
from jaxformer.cost.device import device_bytes, spread
from jaxformer.cost.model_flops import ModelFlops
from jaxformer.cost.plan import Buffer, CollectiveSum, ProgramPlan, Time
from jaxformer.cost.programs import batch_of
from jaxformer.cost.topology import HOST, Topology
from jaxformer.decode import loop
from jaxformer.nn import cache_spec, model
from jaxformer.parallel.placement import state_shardings
from jaxformer.parallel.sharding import ACTIVATIONS, AXES, ROWS, in_use
from jaxformer.training import run
from jaxformer.training.objective import NextToken
from jaxformer.training.update import param_shardings

STATED = (
    "computed by arithmetic, nothing was compiled: parameters, gradients, optimizer and cache are exact",
    "activations are what JAX keeps for the backward pass; temporaries are only the logits or the scores of one layer: both as "
    "in plain attention, which needs more than cuDNN's",
    "time is at the full speed of chip, memory and links, which no program reaches",
    "collectives of experts and context are not counted",
)


def training_bytes(config: run.Config, mesh: Mesh) -> dict[str, float]:
    """Bytes of the update on one device, by kind (``plan.KINDS``)."""
    cfg, train = config.model, config.train
    batch = batch_of(config)
    rows, length = batch["tokens"].shape
    params, optimizer = state_bytes(config, mesh)
    objective = NextToken(cfg, train.label_smoothing, train.loss_chunk, train.mtp_weight, train.z_loss)
    return {
        "parameters": params,
        "optimizer": 0 if config.mesh.offload else optimizer,
        "gradients": params,
        "activations": saved_bytes(objective, batch, rows // train.microbatches, mesh),
        "temporaries": _temporaries(cfg, rows // train.microbatches, length, train.loss_chunk, mesh),
    }


def state_bytes(config: run.Config, mesh: Mesh) -> tuple[int, int]:
    """Bytes of the parameters and of the optimizer's state on one device."""
    state = jax.eval_shape(functools.partial(run.initial_state, config))
    where = state_shardings(state, param_shardings(config.model, mesh))
    sharded = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), state, where)
    return device_bytes(sharded.params), device_bytes(sharded.opt_state)


def training_step(config: run.Config, mesh: Mesh, topology: Topology) -> ProgramPlan:
    """The update."""
    cfg, train, data = config.model, config.train, config.data
    rows, length, sizes = data.batch_size, data.length, training_bytes(config, mesh)
    params, optimizer = state_bytes(config, mesh)
    flops = model_flops.training(cfg, rows, length, config.data.source_length if cfg.encoder_layers else 0)
    chunked = train.loss_chunk is not None and train.loss_chunk < length
    # The optimizer reads gradients, and reads and writes parameters and its state; each microbatch reads parameters in the
    # compute dtype.
    traffic = 3 * params + 2 * optimizer + train.microbatches * (3 * params / 2 + 3 * sizes["activations"])
    used = _collectives(cfg, mesh, topology, rows * length, train.microbatches)
    hardware_flops = _hardware_flops(cfg, flops, chunked, rows * length)
    return _plan("training step", sizes, rows * length, flops, hardware_flops, traffic, used, topology)


def generation(config: run.Config, mesh: Mesh, topology: Topology) -> list[ProgramPlan]:
    """Reading the prompts, and a block of decoding steps."""
    cfg = dataclasses.replace(config.model, param_dtype=config.model.execution.dtype)
    rows, length = config.data.batch_size, config.data.length
    params = device_bytes(spread(model.spec(cfg), cfg, mesh))
    kept = device_bytes(spread(cache_spec.spec(cfg, rows, length), cfg, mesh, ACTIVATIONS))
    sizes = {"parameters": params, "cache": kept, "temporaries": _logits(cfg, rows, mesh)}

    def program(name: str, tokens: int, flops: ModelFlops, times: int) -> ProgramPlan:
        used = [
            dataclasses.replace(c, runs=c.runs * times, bytes=c.bytes * times, seconds=c.seconds * times)
            for c in _collectives(cfg, mesh, topology, tokens // times)
        ]
        traffic = times * (params * mesh.shape["fsdp"] + kept)  # each device reads all that is gathered for it
        return _plan(name, sizes, tokens, flops, flops.total, traffic, used, topology)

    decoding = model_flops.decoding(cfg, rows, length) * loop.BLOCK
    return [
        program("prefill", rows * length, model_flops.prefill(cfg, rows, length), 1),
        program(f"{loop.BLOCK} decode steps", rows * loop.BLOCK, decoding, loop.BLOCK),
    ]


def _plan(name, sizes, tokens, flops: ModelFlops, hardware_flops, traffic, used, topology: Topology) -> ProgramPlan:
    chip, count = topology.chip, topology.count
    compute, links = hardware_flops / count / chip.peak, sum(c.seconds for c in used)
    largest = [Buffer(int(size), kind, f"all {kind}", "") for kind, size in sizes.items()]
    return ProgramPlan.of(
        name,
        tokens,
        flops,
        topology,
        needed=sum(sizes.values()),
        available=chip.hbm,
        memory={kind: int(size) for kind, size in sizes.items()},
        largest=tuple(sorted(largest, key=lambda buffer: -buffer.bytes)),
        hardware_flops=hardware_flops / count,
        traffic_bytes=int(traffic),
        collectives=tuple(used),
        time=Time.of(compute, traffic / chip.bandwidth, links, 0.0, flops.total / count, tokens / count, chip),
    )


def _hardware_flops(cfg: ModelConfig, flops: ModelFlops, chunked: bool, tokens: int) -> float:
    """FLOPs of all devices, with recomputation and masked scores."""
    head = 2.0 * tokens * cfg.vocab_size * cfg.d_model
    attention = flops.attention * (2 if cfg.causal else 1)
    again = {"none": 0.0, "dots": attention / 3, "full": (flops.weights - 3 * head) / 3 + attention / 3}[cfg.execution.remat]
    return flops.weights + attention + again + (head if chunked else 0.0)


ROWS_TRACED = 1009
"""A prime that divides no size of a model: an axis that it divides grows with the rows."""


def saved(objective: NextToken, batch: dict) -> list[tuple[tuple[int, ...], int]]:
    """``(shape, bytes)`` of everything that the forward pass of an objective computes and its backward pass needs, over all
    devices: what JAX itself would keep, traced without any arithmetic."""
    params = jax.eval_shape(functools.partial(model.init, objective.cfg), jax.random.key(0))

    def backward(params, batch):
        return jax.vjp(lambda p: objective(p, batch)[0], params)[1]

    inputs = {(x.shape, x.dtype) for x in jax.tree.leaves(params)}
    kept = jax.tree.leaves(jax.eval_shape(backward, params, batch))
    return [(x.shape, math.prod(x.shape) * x.dtype.itemsize) for x in kept if (x.shape, x.dtype) not in inputs]


def saved_bytes(objective: NextToken, batch: dict, rows: int, mesh: Mesh) -> float:
    """Bytes of ``saved`` on one device, for so many rows. What grows with the rows is spread as they are, and over ``tensor``
    if it has heads, a feed-forward width or the vocabulary; the rest are copies of parameters, spread as parameters are. An
    estimate: XLA may keep less."""
    traced = {name: jax.ShapeDtypeStruct((ROWS_TRACED, *x.shape[1:]), x.dtype) for name, x in batch.items()}
    cfg = objective.cfg
    wide = {size for layer in cfg.layers for size in (layer.n_heads, layer.n_kv_heads, layer.d_ff)} | {cfg.vocab_size}
    of_rows, tensor = mesh.size // mesh.shape["tensor"], mesh.shape["tensor"]
    total = 0.0
    for shape, size in saved(objective, traced):
        if any(n and n % ROWS_TRACED == 0 for n in shape):
            total += size * rows / ROWS_TRACED / (of_rows * (tensor if wide & set(shape) else 1))
        else:
            total += size / (mesh.shape["fsdp"] * tensor)
    return total


def _local_rows(rows: float, mesh: Mesh) -> float:
    return rows / math.prod(mesh.shape[axis] for axis in ROWS)


def _logits(cfg: ModelConfig, rows: float, mesh: Mesh) -> float:
    return _local_rows(rows, mesh) * cfg.vocab_size / mesh.shape["tensor"] * 4


def _temporaries(cfg: ModelConfig, rows: int, length: int, chunk: int | None, mesh: Mesh) -> float:
    """Logits and their gradient; or one layer's scores, in float32 and in the compute dtype, and their gradients."""
    logits = 2 * _logits(cfg, rows, mesh) * min(chunk or length, length)
    heads = max(layer.n_heads for layer in cfg.layers) / mesh.shape["tensor"]
    scores = _local_rows(rows, mesh) * heads * length / mesh.shape["context"] * length
    return max(logits, scores * 2 * (4 + jnp.dtype(cfg.execution.dtype).itemsize))


def _collectives(cfg: ModelConfig, mesh: Mesh, topology: Topology, tokens: int, microbatches: int = 0) -> list[CollectiveSum]:
    """The usual scheme: weights are gathered in the compute dtype for each pass, and gradients scattered (fsdp) or summed
    (data); activations are summed twice per layer and pass (tensor). microbatches: those of training; 0: one forward."""
    training, parts = microbatches > 0, max(1, microbatches)
    weights = device_bytes(spread(model.spec(cfg), cfg, mesh, in_use(), cfg.execution.dtype))
    sums = []

    def add(kind: str, axis: str, runs: int, size: float, trips: int = 1) -> None:
        count = mesh.shape[axis]
        span = math.prod(mesh.shape[name] for name in AXES[AXES.index(axis) :])  # later axes have the nearer neighbors
        speed = topology.chip.link if span <= HOST else topology.chip.outside
        if count > 1:
            sums.append(CollectiveSum(kind, runs, float(runs), int(size), trips * size * (count - 1) / count / speed, 0.0))

    layers = cfg.n_layers + cfg.encoder_layers
    passes = 2 if training else 1
    add("all-gather", "fsdp", passes * parts * layers, passes * parts * weights)
    if training:
        add("reduce-scatter", "fsdp", parts * layers, parts * weights)
        add("all-reduce", "data", 1, weights / mesh.shape["fsdp"], 2)
    activations = tokens * mesh.shape["tensor"] / mesh.size * cfg.d_model * jnp.dtype(cfg.execution.dtype).itemsize
    add("all-reduce", "tensor", 2 * passes * parts * layers, 2 * passes * layers * activations, 2)
    return sums
