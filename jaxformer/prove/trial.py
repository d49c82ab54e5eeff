"""A model on trial: in float32, with random inputs, its programs, and how far their results are apart."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.config import spec as specs
from jaxformer.nn import model
from jaxformer.training.objective import NextToken

Difference = tuple[float, str]
"""The largest difference, relative to the largest number, and where it is."""
ROUNDINGS = 64
"""Roundings by which float32 results may differ per layer: its sums have some hundred terms, and programs choose the order."""
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options of XLA for CPUs, where such small programs compile far longer than they run."""


class Failed(Exception):
    """What a check met that is no difference between numbers."""


class NotApplicable(Exception):
    """Why a check says nothing about a model."""


class Trial:
    """A model, inputs, and compiled programs, which are made anew for each trial: components may have been edited since."""

    def __init__(self, cfg: ModelConfig, params: Any, key: jax.Array, batch: int, length: int):
        self.execution = cfg.execution
        self.cfg = cfg.with_execution(dtype="float32", attention_kernel="auto", remat="none", remat_save=())
        self.params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
        self.rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())
        draw = lambda: np.asarray(self.rng.integers(0, cfg.vocab_size, (batch, length)), np.int32)
        self.tokens = draw()
        self.source: dict[str, Any] = {"source": draw()} if cfg.encoder_layers else {}
        self.half = length // 2
        depth = 1 + cfg.n_layers + cfg.encoder_layers
        self.tolerance = ROUNDINGS * float(np.finfo(np.float32).eps) * depth
        self.tolerances = {
            "exact": (0.0, "the same or not"),
            "float32": (self.tolerance, f"float32: {ROUNDINGS} roundings per layer"),
            "bfloat16": (8 * 2**-8 * depth**0.5, "bfloat16: 8 roundings × √layers"),
        }
        self.program = jit(lambda params, tokens, rows, cfg: output(params, tokens, cfg, **rows), static_argnums=3)
        self.gradient = jit(jax.value_and_grad(scalar), static_argnums=2)
        self.expected = self.run(self.tokens)

    def run(self, tokens: Any, cfg: ModelConfig | None = None, **rows: Any) -> np.ndarray:
        """The output for whole sequences."""
        return np.asarray(self.program(self.params, tokens, self.source | rows, cfg or self.cfg)[0], np.float32)

    def step(self, tokens: Any, cache: Any, **rows: Any) -> tuple[np.ndarray, Any]:
        """The output for a chunk, and the cache after it."""
        logits, cache = self.program(self.params, tokens, {"cache": cache, **rows}, self.cfg)
        return np.asarray(logits), cache

    @functools.cached_property
    def eager(self) -> list[np.ndarray]:
        """The output without ``jit``, twice."""
        return [np.asarray(output(self.params, self.tokens, self.cfg, **self.source)[0]) for _ in range(2)]

    def batch(self, rows: int) -> dict[str, np.ndarray]:
        """A training batch with that number of rows."""
        weights = np.ones(self.tokens.shape, np.float32)
        entries: dict[str, np.ndarray] = {
            "tokens": self.tokens,
            "targets": np.roll(self.tokens, -1, 1),
            "weights": weights,
            **self.source,
        }
        return {name: np.resize(entry, (rows, *entry.shape[1:])) for name, entry in entries.items()}

    def must_differ(self, left: np.ndarray, right: np.ndarray, what: str) -> None:
        """Raises ``Failed`` where two results agree without which a check could not fail."""
        if apart(left, right)[0] <= 8 * self.tolerance:
            raise Failed(f"the check shows nothing: {what}")


def jit(function: Callable, **options: Any) -> Any:
    """``jax.jit``, which on CPUs compiles quickly."""
    return jax.jit(function, compiler_options=QUICK if jax.default_backend() == "cpu" else None, **options)


def output(params: Any, tokens: Any, cfg: ModelConfig, **rows: Any) -> tuple[jax.Array, Any]:
    """Logits, or hidden states of a model without a head, and the cache."""
    out = model.apply(params, tokens, cfg, **rows)
    return model.head(params, out.hidden, cfg) if cfg.has_head else out.hidden, out.cache


def scalar(params: Any, batch: dict[str, Any], cfg: ModelConfig) -> jax.Array:
    """What depends on every parameter: the loss of training, and random sums of results that it does not read."""
    total = jnp.zeros(())
    if cfg.has_head:
        total, sums = NextToken(cfg, training=False)(params, batch, None)
        total = total / sums["weight"]
    if cfg.pooler or not cfg.has_head:
        inputs = {name: batch[name] for name in ("source",) if name in batch}
        hidden_BTD = model.hidden(params, batch["tokens"], cfg, **inputs)
        results = [hidden_BTD] * (not cfg.has_head) + [model.pooled(params, hidden_BTD, cfg)] * cfg.pooler
        total += sum((x * jax.random.normal(jax.random.key(0), x.shape)).mean() for x in results)
    return total


def apart(left: np.ndarray, right: np.ndarray) -> Difference:
    """How far two arrays [B, T, ...] are apart."""
    by_token = np.nan_to_num(np.abs(left - right).max(-1) / (np.abs(right).max() or 1.0), nan=np.inf)
    row, column = np.unravel_index(by_token.argmax(), by_token.shape)
    return float(by_token.max()), f"the largest difference is in row {row} at position {column}"


def trees_apart(left: Any, right: Any) -> Difference:
    """How far two trees are apart, each tensor relative to its largest number, or to a thousandth of the largest of all: some
    gradients, such as those of biases of keys, are nothing but rounding."""
    pairs = [
        (path, np.asarray(x), np.asarray(y)) for (path, x), (_, y) in zip(specs.walk(left), specs.walk(right), strict=True)
    ]
    least = 1e-3 * max(np.abs(y).max() for _, _, y in pairs)
    by_tensor = [(np.abs(x - y).max() / max(np.abs(y).max(), least), path) for path, x, y in pairs]
    return max((float(np.nan_to_num(value, nan=np.inf)), f"the largest difference is in {path}") for value, path in by_tensor)
