"""FLOPs by the model's formula, and what can be said of memory and time by arithmetic alone."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxformer.config import ModelConfig
from jaxformer.config import spec as specs
from jaxformer.nn import model
from jaxformer.parallel.sharding import PARAMETERS, partition_spec
from jaxformer.training.objective import loss_sum


@dataclass(frozen=True)
class ModelFlops:
    """Of all devices, for one run."""

    weights: float
    """2 a token and parameter that it meets, once (forward) or three times (training)."""
    attention: float
    """Scores and mix; of keys that a query does not see, nothing: half of all where it is causal."""

    @property
    def total(self) -> float:
        return self.weights + self.attention


def training(cfg: ModelConfig, rows: int, length: int, source: int = 0) -> ModelFlops:
    """Of an update: 6·N a token, N being the parameters that multiply it (the head among them, lookups of tables not; of
    experts those that it goes to), and attention."""
    encoder, decoder = _met(cfg, "encoder"), _met(cfg, "")
    weights = 6.0 * rows * (decoder * length + encoder * source)
    if cfg.mtp:  # the head once more
        weights += 6.0 * rows * length * cfg.vocab_size * cfg.d_model
    attention = 3.0 * rows * sum(_pair(layer) * _visible(layer, length) for layer in cfg.layers)
    if cfg.mtp:
        attention += 3.0 * rows * _pair(cfg.layers[-1]) * _visible(cfg.layers[-1], length)
    if cfg.encoder_layers:
        attention += (
            3.0 * rows * (cfg.encoder_layers * _pair(cfg.encoder) * source**2 + cfg.n_layers * _pair(cfg) * length * source)
        )
    return ModelFlops(weights, attention)


def prefill(cfg: ModelConfig, rows: int, length: int) -> ModelFlops:
    """Of reading prompts; the head reads the last position alone."""
    head = cfg.vocab_size * cfg.d_model
    weights = 2.0 * rows * ((_met(cfg, "") - head) * length + head)
    return ModelFlops(weights, rows * sum(_pair(layer) * _visible(layer, length) for layer in cfg.layers))


def decoding(cfg: ModelConfig, rows: int, kept: int) -> ModelFlops:
    """Of one more token a row, with ``kept`` tokens in the cache."""
    pairs = sum(_pair(layer) * min(kept, _window(layer, kept)) for layer in cfg.layers)
    return ModelFlops(2.0 * rows * _met(cfg, ""), rows * pairs)


def _met(cfg: ModelConfig, part: str) -> int:
    """Parameters that multiply a token of the encoder, or of all else."""
    total = 0
    for path, param in specs.walk(model.spec(cfg)):
        if path.startswith("encoder.") != (part == "encoder") or path in ("embedding.type", "decoder.position.table"):
            continue
        if path == "embedding.token" and not (cfg.tied_head and cfg.has_head):
            continue
        total += specs.active({"one": param}, cfg)
    return total


def _pair(layer: ModelConfig) -> float:
    """FLOPs of a query and a key in all heads: scores and mix."""
    if layer.attention == "latent":
        return 2.0 * layer.n_heads * (layer.head_dim + layer.latent.rope_dim + layer.latent.value_dim)
    return 4.0 * layer.n_heads * layer.head_dim


def _visible(layer: ModelConfig, length: int) -> float:
    """Pairs of a query and a key that it sees: T²/2 where causal, less with a window."""
    if not layer.causal:
        return float(length * length)
    window = min(_window(layer, length), length)
    return length * window - window * window / 2


def _window(layer: ModelConfig, otherwise: int) -> int:
    return layer.window if isinstance(layer.window, int) else otherwise


# Memory


def local_bytes(spec: Any, cfg: ModelConfig, mesh: Mesh, rules: dict = PARAMETERS, dtype: str | None = None) -> float:
    """Bytes of a tree of ``Param`` on one device."""
    total = 0.0
    for param in jax.tree.leaves(spec, is_leaf=lambda leaf: isinstance(leaf, specs.Param)):
        shape = param.shape(cfg)
        parts = [
            axes if isinstance(axes, tuple) else (axes,) for axes in partition_spec(param.dims, shape, rules, mesh) if axes
        ]
        spread = math.prod(mesh.shape[axis] for axes in parts for axis in axes)
        total += math.prod(shape) * jnp.dtype(param.dtype or dtype or cfg.param_dtype).itemsize / spread
    return total


ROWS_TRACED = 1009
"""A prime, by which no size of a model divides: what does is spread as rows are."""


def saved(cfg: ModelConfig, batch: dict, **options) -> list[tuple[tuple[int, ...], int]]:
    """``(shape, bytes)`` of all that the backward pass of a loss needs and the forward pass has made, over all devices: what
    JAX itself would keep, traced without any arithmetic."""
    params = specs.abstract(model.spec(cfg), cfg)

    def backward(params, batch):
        return jax.vjp(lambda p: loss_sum(p, batch, cfg, None, **options)[0], params)[1]

    own = {(x.shape, x.dtype) for x in jax.tree.leaves(params)}
    kept = jax.tree.leaves(jax.eval_shape(backward, params, batch))
    return [(x.shape, math.prod(x.shape) * x.dtype.itemsize) for x in kept if (x.shape, x.dtype) not in own]


def saved_on_device(cfg: ModelConfig, batch: dict, rows: int, mesh: Mesh, **options) -> float:
    """Bytes of ``saved`` on one device, of so many rows: what grows with the rows is spread as they are, and over heads or
    feed-forward where it has them; what does not is a parameter's copy, spread as parameters are. An estimate: XLA may keep
    less."""
    traced = {name: jax.ShapeDtypeStruct((ROWS_TRACED, *x.shape[1:]), x.dtype) for name, x in batch.items()}
    wide = {cfg.n_heads, cfg.n_kv_heads, cfg.d_ff, cfg.vocab_size}
    of_rows, tensor = mesh.size // mesh.shape["tensor"], mesh.shape["tensor"]
    total = 0.0
    for shape, size in saved(cfg, traced, **options):
        if any(n and n % ROWS_TRACED == 0 for n in shape):
            total += size * rows / ROWS_TRACED / (of_rows * (tensor if wide & set(shape) else 1))
        else:
            total += size / (mesh.shape["fsdp"] * tensor)
    return total
