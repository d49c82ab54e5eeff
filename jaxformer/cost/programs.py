"""The programs of a run as they would be compiled: the training step, or the two of generation. Nothing here has values."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformer.config import ModelConfig
from jaxformer.config import spec as specs
from jaxformer.cost import model_flops
from jaxformer.cost.device import device_shape, spread
from jaxformer.cost.model_flops import ModelFlops
from jaxformer.data.config import TASKS
from jaxformer.decode import loop
from jaxformer.decode.request import Inputs, Request
from jaxformer.decode.sampling import GREEDY, compile_sampling
from jaxformer.nn import block, cache_spec, model
from jaxformer.nn.named import watch
from jaxformer.parallel.placement import batch_shardings, check_batch, jitted, state_shardings
from jaxformer.parallel.sharding import ACTIVATIONS, partition_spec
from jaxformer.training import run
from jaxformer.training.config import NEXT_TOKEN
from jaxformer.training.update import param_shardings

PLATFORM = "tpu"
CHUNK = 512
"""Prompt tokens that generation reads at a time by default."""


@dataclass(frozen=True)
class Program:
    """One program of a run."""

    name: str
    lower: Callable[[], Any]
    """Traces it for the devices of the mesh; only compiling remains."""
    tokens: int
    """Tokens that one run trains on, reads or generates, on all devices."""
    flops: ModelFlops
    parameters: dict[str, tuple[int, ...]]
    """Full dimensions of all parameters."""
    activations: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The dimensions that one device holds of the named activations."""


def batch_of(config: run.Config) -> dict[str, jax.ShapeDtypeStruct]:
    """A training batch as the config's data would give it. Raises ValueError for data and objectives of a user's own."""
    data = config.data
    if data.task not in TASKS or config.train.objective != NEXT_TOKEN:
        raise ValueError(
            "only the library's own data.task and train.objective can be planned, because the batches of others are unknown"
        )
    entry = lambda dtype, length=data.length: jax.ShapeDtypeStruct((data.batch_size, length), jnp.dtype(dtype))
    batch = {"tokens": entry("int32"), "targets": entry("int32"), "weights": entry("float32")}
    if config.model.encoder_layers:
        return batch | {"source": entry("int32", data.source_length), "source_valid": entry("bool", data.source_length)}
    return batch | ({"segments": entry("int32"), "positions": entry("int32")} if data.segment_documents else {})


def check(config: run.Config, mesh: Mesh, decode: bool) -> None:
    """Raises ValueError for what would otherwise fail after minutes of compiling."""
    check_batch(batch_of(config), mesh, 1 if decode else config.train.microbatches)
    cfg = config.model
    if config.data.length > cfg.max_length and (decode or cfg.position == "learned"):
        raise ValueError(f"data.length={config.data.length} is past model.max_length={cfg.max_length}")
    if decode and (cfg.encoder_layers or not cfg.causal or not cfg.has_head):
        raise ValueError("generation can be planned only for causal decoders with a head; leave out --decode")


def training_step(config: run.Config, mesh: Mesh) -> Program:
    """The update of ``train.py`` on a mesh."""
    cfg, train = config.model, config.train
    batch = batch_of(config)

    def lower():
        state = jax.eval_shape(functools.partial(run.initial_state, config))
        where = state_shardings(state, param_shardings(cfg, mesh), config.mesh.offload)
        update = run.make_update(config, run.make_objective(config))
        sharded = _sharded(state, where), _sharded(batch, batch_shardings(batch, mesh))
        return _lower(jitted(update, where, mesh), mesh, *sharded)

    rows, length = batch["tokens"].shape
    flops = model_flops.training(cfg, rows, length, config.data.source_length if cfg.encoder_layers else 0)
    activations = _activations(cfg, batch, rows // train.microbatches, mesh)
    return Program("training step", lower, rows * length, flops, _dimensions(cfg), activations)


def generation(config: run.Config, mesh: Mesh) -> list[Program]:
    """What ``jf.generate`` runs for ``data.batch_size`` prompts of ``data.length`` tokens in all: reading the prompts, and a
    block of single steps, each with as many tokens in the cache. Parameters are in the compute dtype and one tree per layer;
    the cache is spread over the mesh by its letters."""
    cfg = dataclasses.replace(config.model, param_dtype=config.model.execution.dtype)
    rows, length = config.data.batch_size, config.data.length
    methods, values = compile_sampling(GREEDY, rows, cfg.vocab_size)
    request = Request(cfg, length, cache_length=length, methods=methods, prefill_chunk=min(CHUNK, length))
    everywhere = NamedSharding(mesh, PartitionSpec())
    on_rows = lambda shape: NamedSharding(mesh, partition_spec("BT"[: len(shape)], shape, ACTIVATIONS, mesh))
    prompts, lengths = (jax.ShapeDtypeStruct(x, jnp.int32, sharding=on_rows(x)) for x in ((rows, length), (rows,)))
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=everywhere)
    params = _unstacked(cfg, mesh)

    def read(params, prompts, lengths, key):
        return loop.start(params, Inputs(prompts, lengths, key, values, {}), request)

    def step(params, state):
        return loop.block(params, state, values, request, loop.BLOCK)

    state, emitted = jax.eval_shape(read, params, prompts, lengths, key)
    row = lambda x: on_rows(x.shape[:1])
    cache = jax.tree.map(lambda x: x.sharding, spread(cache_spec.spec(cfg, rows, length), cfg, mesh, ACTIVATIONS))
    state_at = dataclasses.replace(jax.tree.map(row, state), cache=cache)
    read_jit = jax.jit(read, out_shardings=(state_at, jax.tree.map(row, emitted)))
    step_jit = jax.jit(step, out_shardings=(state_at, everywhere), donate_argnums=1)
    lower_read = functools.partial(_lower, read_jit, mesh, params, prompts, lengths, key)
    lower_step = functools.partial(_lower, step_jit, mesh, params, _sharded(state, state_at))
    reading, decoding = model_flops.prefill(cfg, rows, length), model_flops.decoding(cfg, rows, length)
    return [
        Program("prefill", lower_read, rows * length, reading, _dimensions(cfg)),
        Program(f"{loop.BLOCK} decode steps", lower_step, rows * loop.BLOCK, decoding * loop.BLOCK, _dimensions(cfg)),
    ]


def _lower(function: Any, mesh: Mesh, *arguments: Any) -> Any:
    with jax.set_mesh(mesh):
        return function.trace(*arguments).lower(lowering_platforms=(PLATFORM,))


def _sharded(tree: Any, where: Any) -> Any:
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), tree, where)


def _unstacked(cfg: ModelConfig, mesh: Mesh) -> Any:
    """Abstract parameters of a decoder on the mesh, one tree per layer."""
    spec = model.spec(cfg)
    layers = {str(i): specs.bound(block.spec(layer), layer) for i, layer in enumerate(cfg.layers)}
    return spread(spec | {"decoder": spec["decoder"] | {"layers": layers}}, cfg, mesh)


def _dimensions(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {path: param.shape(cfg) for path, param in specs.walk(model.spec(cfg))}


class _Seen:
    """A ``Watcher`` of named activations, which keeps the dimensions that a device holds of them."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.dimensions = mesh, dict[str, tuple[int, ...]]()

    def activation(self, name: str, dims: str, x: jax.Array) -> None:
        self.dimensions[name] = device_shape(dims, x.shape, ACTIVATIONS, self.mesh)

    def product(self, name: str, equation: str, x: jax.Array, y: jax.Array, by: Callable) -> jax.Array:
        return by(x, y)


def _activations(cfg: ModelConfig, batch: Any, rows: int, mesh: Mesh) -> dict[str, tuple[int, ...]]:
    inputs = {name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for name, x in batch.items()}
    tokens, seen = inputs.pop("tokens"), _Seen(mesh)
    options = {name: x for name, x in inputs.items() if name not in ("targets", "weights")}
    with watch(seen):
        params = jax.eval_shape(functools.partial(model.init, cfg), jax.random.key(0))
        jax.eval_shape(lambda params, tokens, options: model.hidden(params, tokens, cfg, **options), params, tokens, options)
    return seen.dimensions
