"""Plans by arithmetic alone, for chips that nothing here compiles for."""

import dataclasses
import math

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxformer.config import ModelConfig
from jaxformer.decode import loop
from jaxformer.nn import cache as caches
from jaxformer.nn import model
from jaxformer.parallel.sharding import ACTIVATIONS, AXES, IN_USE, ROWS
from jaxformer.plan import formula
from jaxformer.plan.compile import estimate, host_bytes
from jaxformer.plan.programs import UPDATE, batch_of
from jaxformer.plan.record import Buffered, CollectiveSum, ProgramPlan
from jaxformer.plan.topology import HOST, Topology
from jaxformer.training import run

STATED = (
    "by arithmetic, nothing was compiled: parameters, gradients, optimizer and cache are exact",
    "activations are what JAX keeps for the backward pass; temporaries are logits and one layer's scores alone: both those of "
    "plain attention, which are more than cuDNN's",
    "time is at full speed of chip, memory and links, which no program reaches",
    "collectives of experts and context are not counted",
)


def training_step(config: run.Config, mesh: Mesh, topology: Topology) -> ProgramPlan:
    """Of the update."""
    cfg, train = config.model, config.train
    batch = batch_of(config)
    rows, length = batch["tokens"].shape
    options = {name: getattr(train, name) for name in UPDATE if name != "microbatches"}
    options["chunk"] = options.pop("loss_chunk")
    params = formula.local_bytes(model.spec(cfg), cfg, mesh)
    sizes = {
        "parameters": params,
        "optimizer": 0 if config.mesh.offload else 2 * params,
        "gradients": params,
        "activations": formula.saved_on_device(cfg, batch, rows // train.microbatches, mesh, **options),
        "temporaries": _temporaries(cfg, rows // train.microbatches, length, train.loss_chunk, mesh),
    }
    flops = formula.training(cfg, rows, length, config.data.source_length if cfg.encoder_layers else 0)
    done = _done(cfg, flops, train.loss_chunk is not None and train.loss_chunk < length, rows * length) / topology.count
    # Parameters are read and written by the optimizer with its two moments, and read in the compute dtype by each microbatch.
    traffic = 7 * params + train.microbatches * (3 * params / 2 + 3 * sizes["activations"])
    used = _collectives(config, cfg, mesh, topology, rows * length)
    return _plan("training step", sizes, rows * length, flops, done, traffic, used, topology)


def generation(config: run.Config, mesh: Mesh, topology: Topology) -> list[ProgramPlan]:
    """Of reading prompts and of a block of steps."""
    cfg = dataclasses.replace(config.model, param_dtype=config.model.execution.dtype)
    rows, length = config.data.batch_size, config.data.length
    params = formula.local_bytes(model.spec(cfg), cfg, mesh)
    cache = formula.local_bytes(caches.spec(cfg, rows, length), cfg, mesh, ACTIVATIONS)
    sizes = {"parameters": params, "cache": cache, "temporaries": _logits(cfg, rows, mesh)}
    reading, step = formula.prefill(cfg, rows, length), formula.decoding(cfg, rows, length)
    steps = formula.ModelFlops(step.weights * loop.BLOCK, step.attention * loop.BLOCK)
    whole = params * mesh.shape["fsdp"]  # what each device reads, its own part and what is brought to it

    def one(name, tokens, flops, times):
        used = _collectives(config, cfg, mesh, topology, tokens // times, training=False)
        used = [dataclasses.replace(c, runs=c.runs * times, bytes=c.bytes * times, seconds=c.seconds * times) for c in used]
        return _plan(name, sizes, tokens, flops, flops.total / topology.count, times * (whole + cache), used, topology)

    return [
        one("prefill", rows * length, reading, 1),
        one(f"{loop.BLOCK} decode steps", rows * loop.BLOCK, steps, loop.BLOCK),
    ]


def _plan(name, sizes, tokens, flops, done, traffic, used, topology: Topology) -> ProgramPlan:
    needed = sum(sizes.values())
    links = sum(c.seconds for c in used)
    return ProgramPlan(
        name=name,
        fits=needed <= topology.chip.hbm,
        needed_bytes=int(needed),
        available_bytes=int(topology.chip.hbm),
        memory={kind: int(size) for kind, size in sizes.items()},
        largest=tuple(
            Buffered(int(sizes[kind]), kind, f"all {kind}", "") for kind in sorted(sizes, key=sizes.get, reverse=True)
        ),
        tokens=tokens,
        model_flops=flops.total / topology.count,
        attention_flops=flops.attention / topology.count,
        hardware_flops=done,
        kernel_flops=0.0,
        traffic_bytes=int(traffic),
        collectives=tuple(used),
        time=estimate(done / topology.chip.peak, traffic / topology.chip.bandwidth, links, 0.0, flops.total, tokens, topology),
        compile_seconds=0.0,
        host_bytes=host_bytes(),
        notes=(),
    )


def _done(cfg: ModelConfig, flops: formula.ModelFlops, chunked: bool, tokens: int) -> float:
    """FLOPs of all devices with what is computed again, and masked scores too."""
    head = 2.0 * tokens * cfg.vocab_size * cfg.d_model
    attention = flops.attention * (2 if cfg.causal else 1)
    again = {"none": 0.0, "dots": attention / 3, "full": (flops.weights - 3 * head) / 3 + attention / 3}[cfg.execution.remat]
    return flops.weights + attention + again + (head if chunked else 0.0)


def _logits(cfg: ModelConfig, rows: float, mesh: Mesh) -> float:
    own = math.prod(mesh.shape[axis] for axis in ROWS)
    return rows / own * cfg.vocab_size / mesh.shape["tensor"] * 4


def _temporaries(cfg: ModelConfig, rows: int, length: int, chunk: int | None, mesh: Mesh) -> float:
    """Logits and their gradient; or one layer's scores, in float32 and in the compute dtype, and their gradients."""
    own = rows / math.prod(mesh.shape[axis] for axis in ROWS)
    logits = 2 * _logits(cfg, rows, mesh) * min(chunk or length, length)
    bytes_each = 2 * (4 + jnp.dtype(cfg.execution.dtype).itemsize)
    scores = own * cfg.n_heads / mesh.shape["tensor"] * length / mesh.shape["context"] * length * bytes_each
    return max(logits, scores)


def _collectives(config, cfg, mesh: Mesh, topology: Topology, tokens: int, training: bool = True) -> list[CollectiveSum]:
    """By the usual scheme: weights gathered in the compute dtype for each pass and gradients scattered (fsdp), gradients
    summed (data), activations summed twice a layer and pass (tensor)."""
    sizes, width = mesh.shape, jnp.dtype(cfg.execution.dtype).itemsize
    parts = config.train.microbatches if training else 1
    model_bytes = formula.local_bytes(model.spec(cfg), cfg, mesh, IN_USE, cfg.execution.dtype)
    found = []

    def add(kind, axis, runs, size, passes=1):
        count = sizes[axis]
        span = math.prod(sizes[name] for name in AXES[AXES.index(axis) :])  # what comes later in the mesh lies nearer together
        speed = topology.chip.link if span <= HOST else topology.chip.outside
        if count > 1:
            seconds = passes * size * (count - 1) / count / speed
            found.append(CollectiveSum(kind, int(runs), float(runs), int(size), seconds, 0.0))

    layers = cfg.n_layers + cfg.encoder_layers
    passes = 2 if training else 1
    add("all-gather", "fsdp", passes * parts * layers, passes * parts * model_bytes)
    if training:
        add("reduce-scatter", "fsdp", parts * layers, parts * model_bytes)
        add("all-reduce", "data", 1, model_bytes / max(1, sizes["fsdp"]), 2)
    local = tokens * sizes["tensor"] / mesh.size
    add("all-reduce", "tensor", 2 * passes * parts * layers, 2 * passes * layers * local * cfg.d_model * width, 2)
    return found
