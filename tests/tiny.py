"""Small models of every published family, and batches for them, shared by the tests."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxformer as jf

_SMALL: dict[str, Any] = {"vocab_size": 67, "d_model": 32, "n_layers": 3, "d_ff": 48, "max_length": 24}
_NO_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0}

PRESETS: dict[str, jf.ModelConfig] = {
    "transformer_base": jf.presets.transformer_base(**_SMALL, **_NO_DROPOUT, n_heads=4, start_token=1),
    "decoder_2017": jf.presets.decoder_2017(**_SMALL, **_NO_DROPOUT, n_heads=4),
    "decoder_2017_learned": jf.presets.decoder_2017(**_SMALL, **_NO_DROPOUT, n_heads=4, position="learned"),
    "gpt2": jf.presets.gpt2(**_SMALL, **_NO_DROPOUT, n_heads=4),
    "llama_mha": jf.presets.llama(**_SMALL, n_heads=4),
    "llama_gqa": jf.presets.llama(**_SMALL, n_heads=4, n_kv_heads=2),
    "llama_mqa": jf.presets.llama(**_SMALL, n_heads=4, n_kv_heads=1),
    "qwen2_5": jf.presets.qwen2_5_0_5b(**_SMALL, n_heads=4, n_kv_heads=2),
    "qwen3": jf.presets.qwen3_0_6b(**_SMALL, n_heads=4, n_kv_heads=2, head_dim=16),
    "mistral": jf.presets.mistral_7b(**_SMALL, n_heads=4, n_kv_heads=2, window=4),
    "deepseek": jf.presets.deepseek_v3(
        **_SMALL,
        n_heads=4,
        head_dim=8,
        latent=jf.Latent(rank=12, query_rank=10, rope_dim=4, value_dim=6),
        experts=jf.Experts(n_experts=4, per_token=2, d_ff=12, layers=(0,), shared=1, score="sigmoid", selection_bias=True),
        dtype="float32",
        param_dtype="float32",
    ),
    "mixed_windows": jf.presets.llama(**_SMALL, n_heads=4, window=(4, None, 4), rope_layout="half"),
}
forward_cached = jax.jit(jf.forward_cached, static_argnums=2)
DECODERS = {name: cfg for name, cfg in PRESETS.items() if not cfg.encoder_layers}


def perturbed(cfg: jf.ModelConfig, seed: int = 0) -> dict:
    """Initial parameters with noise on every tensor, so that gains and biases, which start at 1 and 0, are tested too."""
    params = jf.init(cfg, jax.random.key(seed))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed + 1)
    return jax.tree.unflatten(tree, [leaf + 0.1 * rng.standard_normal(leaf.shape).astype(leaf.dtype) for leaf in leaves])


def drawn(cfg: jf.ModelConfig, seed: int = 0) -> dict:
    """Like ``perturbed``, but from NumPy alone: compiling ``jf.init`` takes longer than most tests."""
    rng = np.random.default_rng(seed)

    def one(param):
        noise = rng.standard_normal(param.shape(cfg)).astype(cfg.param_dtype)
        # gains and biases start at a constant, whatever the key; 0.2 is about 1/sqrt(D)
        values = 0.2 * noise if param.decay else np.asarray(param.init(None, noise.shape, noise.dtype)) + 0.1 * noise
        return jnp.asarray(values)

    return jax.tree.map(one, jf.model.spec(cfg), is_leaf=lambda leaf: isinstance(leaf, jf.Param))


def tokens(cfg: jf.ModelConfig, batch: int = 2, length: int = 9, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, cfg.vocab_size, (batch, length), dtype=np.int32)


def inputs(cfg: jf.ModelConfig, batch: int = 2, seed: int = 0) -> dict[str, np.ndarray]:
    """The keywords that a forward of ``cfg`` needs besides tokens: the source of an encoder–decoder, one row of it padded."""
    if not cfg.encoder_layers:
        return {}
    valid = np.ones((batch, 7), bool)
    valid[0, 5:] = False
    return {"source": tokens(cfg, batch, 7, seed + 10), "source_valid": valid}


def batch(cfg: jf.ModelConfig, rows: int = 4, length: int = 8, seed: int = 0) -> dict[str, np.ndarray]:
    """A training batch with rows of unequal numbers of counted tokens."""
    ids = tokens(cfg, rows, length + 1, seed)
    counted = np.arange(length) < (np.arange(rows)[:, None] * 3) % length + 1
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": counted.astype(np.float32)} | inputs(cfg, rows, seed)


def with_dropout(cfg: jf.ModelConfig, rate: float = 0.2) -> jf.ModelConfig:
    return dataclasses.replace(cfg, attention_dropout=rate, residual_dropout=rate, embedding_dropout=rate)
