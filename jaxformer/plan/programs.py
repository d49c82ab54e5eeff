"""The programs of a run, as they would be compiled: the training step, and the two of generation. Nothing here has values."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformer.config import ModelConfig
from jaxformer.config.spec import Param, walk
from jaxformer.decode import loop
from jaxformer.decode.request import Inputs, Request
from jaxformer.decode.sampling import GREEDY, compile_sampling
from jaxformer.nn import cache as caches
from jaxformer.nn import model
from jaxformer.nn.named import watch
from jaxformer.parallel.mesh import batch_shardings, check_batch, jitted, state_shardings
from jaxformer.parallel.sharding import ACTIVATIONS, partition_spec, shardings
from jaxformer.plan import formula
from jaxformer.training import run
from jaxformer.training.update import init_state, make_update

UPDATE = ("microbatches", "label_smoothing", "loss_chunk", "mtp_weight")
"""Fields of ``train`` that the update is made with."""
CHUNK = 512
"""Prompt tokens that generation reads at a time, unless it is told otherwise."""


@dataclass(frozen=True)
class Program:
    """One program of a run."""

    name: str
    lower: Callable[[], Any]
    """Traces it for the mesh's devices; compiling is then left to do."""
    tokens: int
    """Tokens that it trains on, reads or makes each time, on all devices."""
    flops: formula.ModelFlops
    training: bool
    named: dict[str, tuple[int, ...]]
    """Named activations, with the dimensions that one device holds."""
    whole: dict[str, tuple[int, ...]]
    """Parameters, with all their dimensions."""


def batch_of(config: run.Config) -> dict[str, jax.ShapeDtypeStruct]:
    """A training batch, as the data of a config would give it."""
    data = config.data
    whole = lambda dtype, length=data.length: jax.ShapeDtypeStruct((data.batch_size, length), jnp.dtype(dtype))
    batch = {"tokens": whole("int32"), "targets": whole("int32"), "weights": whole("float32")}
    if config.model.encoder_layers:
        return batch | {"source": whole("int32", data.source_length), "source_valid": whole("bool", data.source_length)}
    return batch | ({"segments": whole("int32"), "positions": whole("int32")} if data.segment_documents else {})


def check(config: run.Config, mesh: Mesh, decode: bool) -> None:
    """Raises ValueError for what would fail after minutes of compiling."""
    check_batch(batch_of(config), mesh, 1 if decode else config.train.microbatches)
    cfg = config.model
    if config.data.length > cfg.max_length and (decode or cfg.position == "learned"):
        raise ValueError(f"data.length={config.data.length} is past model.max_length={cfg.max_length}")
    if decode and (cfg.encoder_layers or not cfg.causal or not cfg.has_head):
        raise ValueError("generation is planned for causal decoders with a head alone; leave out --decode")


def training_step(config: run.Config, mesh: Mesh, platform: str) -> Program:
    """The update of ``train.py`` on a mesh."""
    cfg, optim, train = config.model, config.optim, config.train
    batch = batch_of(config)
    options = {name: getattr(train, name) for name in UPDATE}

    def lower():
        state = jax.eval_shape(functools.partial(init_state, cfg, optim, train.steps, train.seed))
        where = state_shardings(state, cfg, mesh, config.mesh.offload)
        update = make_update(cfg, optim, train.steps, **options)
        with jax.set_mesh(mesh):
            step = jitted(update, where, mesh)
            given = _placed(state, where), _placed(batch, batch_shardings(batch, mesh))
            return step.trace(*given).lower(lowering_platforms=(platform,))

    rows, length = batch["tokens"].shape
    return Program(
        name="training step",
        lower=lower,
        tokens=rows * length,
        flops=formula.training(cfg, rows, length, config.data.source_length if cfg.encoder_layers else 0),
        training=True,
        named=_named(cfg, batch, rows // train.microbatches, mesh),
        whole=_whole(cfg),
    )


def generation(config: run.Config, mesh: Mesh, platform: str) -> list[Program]:
    """What ``jf.generate`` runs, for ``data.batch_size`` prompts of ``data.length`` tokens in all: reading the prompts, and a
    block of single steps, each with as many tokens in the cache. Parameters are in the compute dtype, layers apart; the cache
    lies on the mesh by its letters."""
    cfg = dataclasses.replace(config.model, param_dtype=config.model.execution.dtype)
    rows, length = config.data.batch_size, config.data.length
    methods, values = compile_sampling(GREEDY, rows, cfg.vocab_size)
    request = Request(cfg, length, cache_length=length, methods=methods, prefill_chunk=min(CHUNK, length))
    whole = NamedSharding(mesh, PartitionSpec())
    params = _unstacked(cfg, mesh)
    on_rows = lambda dims, shape, dtype: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, partition_spec(dims, shape, ACTIVATIONS, mesh))
    )
    prompts, lengths = on_rows("BT", (rows, length), jnp.int32), on_rows("B", (rows,), jnp.int32)
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=whole)
    is_param = lambda leaf: isinstance(leaf, Param)
    kept = caches.spec(cfg, rows, length)
    cache_at = jax.tree.map(
        lambda p: NamedSharding(mesh, partition_spec(p.dims, p.shape(cfg), ACTIVATIONS, mesh)), kept, is_leaf=is_param
    )

    def read(params, prompts, lengths, key):
        return loop.start(params, Inputs(prompts, lengths, key, values, {}), request)

    def step(params, state):
        return loop.block(params, state, values, request, loop.BLOCK)

    state, emitted = jax.eval_shape(read, params, prompts, lengths, key)
    row = lambda x: NamedSharding(mesh, partition_spec("B", x.shape[:1], ACTIVATIONS, mesh))
    state_at = dataclasses.replace(jax.tree.map(row, state), cache=cache_at)

    def lower_with(function, results, *given, **options):
        def lower():
            with jax.set_mesh(mesh):
                traced = jax.jit(function, out_shardings=results, **options).trace(*given)
                return traced.lower(lowering_platforms=(platform,))

        return lower

    read_all = lower_with(read, (state_at, jax.tree.map(row, emitted)), params, prompts, lengths, key)
    steps = lower_with(step, (state_at, whole), params, _placed(state, state_at), donate_argnums=1)
    one = formula.decoding(cfg, rows, length)
    block = formula.ModelFlops(one.weights * loop.BLOCK, one.attention * loop.BLOCK)
    return [
        Program("prefill", read_all, rows * length, formula.prefill(cfg, rows, length), False, {}, _whole(cfg)),
        Program(f"{loop.BLOCK} decode steps", steps, rows * loop.BLOCK, block, False, {}, _whole(cfg)),
    ]


def _placed(tree: Any, where: Any) -> Any:
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), tree, where)


def _unstacked(cfg: ModelConfig, mesh: Mesh) -> Any:
    """Abstract parameters, a tree a layer, on the mesh."""
    stacked = _placed(
        jax.eval_shape(functools.partial(model.init, cfg), jax.random.key(0)), shardings(model.spec(cfg), cfg, mesh)
    )
    apart = jax.eval_shape(functools.partial(model.unstack, cfg=cfg), stacked)
    at = {tuple(entry.key for entry in path): leaf.sharding for path, leaf in jax.tree.leaves_with_path(stacked)}

    def one(path, leaf):
        keys = tuple(entry.key for entry in path)
        if keys in at:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at[keys])
        whole = at[tuple(key for key in keys if not key.isdigit())]
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(*whole.spec[1:])))

    return jax.tree.map_with_path(one, apart)


def _whole(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {path: param.shape(cfg) for path, param in walk(model.spec(cfg))}


class _Seen:
    """Named activations and the dimensions that a device holds of them, as ``nn.named.watch`` tells of them."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.found = mesh, dict[str, tuple[int, ...]]()

    def activation(self, name: str, dims: str, x: jax.Array) -> None:
        spread = partition_spec(dims, x.shape, ACTIVATIONS, self.mesh)
        self.found[name] = NamedSharding(self.mesh, spread).shard_shape(x.shape)

    def product(self, name: str, equation: str, x: jax.Array, y: jax.Array, by: Callable) -> jax.Array:
        return by(x, y)


def _named(cfg: ModelConfig, batch: Any, rows: int, mesh: Mesh) -> dict[str, tuple[int, ...]]:
    part = {n: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for n, x in batch.items() if n not in ("targets", "weights")}
    tokens, seen = part.pop("tokens"), _Seen(mesh)
    with watch(seen):
        params = jax.eval_shape(functools.partial(model.init, cfg), jax.random.key(0))
        jax.eval_shape(lambda params, tokens, part: model.hidden(params, tokens, cfg, **part), params, tokens, part)
    return seen.found
