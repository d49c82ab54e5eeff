"""The published architectures, each a function that gives a ``ModelConfig``. Every field can be overridden by keyword."""

import inspect
from collections.abc import Callable
from typing import Any

from jaxformer.config.architecture import ModelConfig
from jaxformer.config.components import nearest
from jaxformer.config.strict import Derived
from jaxformer.config.subconfigs import Experts, Latent, RopeScaling


def _preset(defaults: dict[str, Any], fields: dict[str, Any]) -> ModelConfig:
    return ModelConfig(**{**defaults, **fields})


def _as_many_layers(cfg: ModelConfig) -> int:
    """An encoder as deep as the decoder."""
    return cfg.n_layers


def _two_thirds(cfg: ModelConfig) -> int:
    """Two thirds of 4·d_model, for the three matrices of a gated feed-forward, rounded up to a multiple of 16."""
    return -(-8 * cfg.d_model // 48) * 16


def transformer_base(**fields) -> ModelConfig:
    """The 2017 encoder–decoder, base (Vaswani et al., table 3): Post-LN, ReLU, sinusoids, one array for both embeddings and
    the head."""
    defaults: dict[str, Any] = {
        "vocab_size": 37_000,
        "d_model": 512,
        "n_layers": 6,
        "encoder_layers": Derived(0, _as_many_layers),
        "n_heads": 8,
        "max_length": 512,
        "mlp": "relu",
        "mlp_bias": True,
        "norm": "layer",
        "residual": "post",
        "position": "sinusoidal",
        "tied_head": True,
        "scale_embedding": True,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
        "embedding_dropout": 0.1,
        "init": "xavier",
    }
    return _preset(defaults, fields)


def transformer_big(**fields) -> ModelConfig:
    """The 2017 encoder–decoder, big: twice the width and heads, more dropout."""
    defaults = {"d_model": 1024, "n_heads": 16, "residual_dropout": 0.3, "embedding_dropout": 0.3}
    return transformer_base(**{**defaults, **fields})


def decoder_2017(**fields) -> ModelConfig:
    """The 2017 decoder alone: Post-LN, ReLU, positions added to the embedding (sinusoidal, or position='learned')."""
    return transformer_base(**{"encoder_layers": 0, **fields})


def gpt2(**fields) -> ModelConfig:
    """GPT-2 small, 124M (Radford et al. 2019): Pre-LN, tanh GELU, learned positions, biases, tied head."""
    defaults: dict[str, Any] = {
        "vocab_size": 50_257,
        "d_model": 768,
        "n_layers": 12,
        "n_heads": 12,
        "max_length": 1024,
        "mlp": "gelu_tanh",
        "mlp_bias": True,
        "qkv_bias": True,
        "out_bias": True,
        "norm": "layer",
        "position": "learned",
        "tied_head": True,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
        "embedding_dropout": 0.1,
        "init": "normal",
        "scale_residual_init": True,
    }
    return _preset(defaults, fields)


def gpt2_medium(**fields) -> ModelConfig:
    """GPT-2 medium, 355M."""
    return gpt2(**{"d_model": 1024, "n_layers": 24, "n_heads": 16, **fields})


def gpt2_large(**fields) -> ModelConfig:
    """GPT-2 large, 774M."""
    return gpt2(**{"d_model": 1280, "n_layers": 36, "n_heads": 20, **fields})


def gpt2_xl(**fields) -> ModelConfig:
    """GPT-2 XL, 1.6B."""
    return gpt2(**{"d_model": 1600, "n_layers": 48, "n_heads": 25, **fields})


def llama(**fields) -> ModelConfig:
    """The LLaMA block (Touvron et al. 2023): RMSNorm, RoPE, SwiGLU, no biases. Sizes must be given: vocab_size, d_model,
    n_layers, n_heads; n_kv_heads for GQA; d_ff is (8/3)·d_model rounded up to a multiple of 16 unless given."""
    required = ("vocab_size", "d_model", "n_layers", "n_heads")
    if missing := [name for name in required if name not in fields]:
        near = [f"{name!r}{nearest(name, ModelConfig.keywords())}" for name in fields if name not in ModelConfig.keywords()]
        hint = f"; unknown: {', '.join(near)}" if near else ""
        raise ValueError(f"llama needs {', '.join(missing)}{hint}")
    defaults: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "position": "rope", "d_ff": Derived(0, _two_thirds)}
    return _preset(defaults, fields)


def llama2_7b(**fields) -> ModelConfig:
    """LLaMA-2 7B: MHA."""
    sizes = {"vocab_size": 32_000, "d_model": 4096, "n_layers": 32, "n_heads": 32, "d_ff": 11_008, "max_length": 4096}
    return llama(**{**sizes, **fields})


def llama3_8b(**fields) -> ModelConfig:
    """LLaMA-3 8B: GQA, RoPE base 500,000."""
    sizes = {"vocab_size": 128_256, "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "d_ff": 14_336}
    return llama(**{**sizes, "max_length": 8192, "rope_theta": 500_000.0, **fields})


def llama2_70b(**fields) -> ModelConfig:
    """LLaMA-2 70B: GQA."""
    sizes = {"d_model": 8192, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8, "d_ff": 28_672}
    return llama2_7b(**{**sizes, **fields})


def llama3_1_8b(**fields) -> ModelConfig:
    """LLaMA-3.1 8B: LLaMA-3 with its RoPE scaled for a context of 131,072."""
    scaling = RopeScaling("llama3", factor=8.0, original_length=8192)
    return llama3_8b(**{"max_length": 131_072, "rope_scaling": scaling, **fields})


def llama3_1_70b(**fields) -> ModelConfig:
    """LLaMA-3.1 70B."""
    sizes = {"d_model": 8192, "n_layers": 80, "n_heads": 64, "d_ff": 28_672}
    return llama3_1_8b(**{**sizes, **fields})


def llama3_2_1b(**fields) -> ModelConfig:
    """LLaMA-3.2 1B, tied head, up to its original context of 8,192 (beyond it the published model scales its RoPE)."""
    sizes = {"vocab_size": 128_256, "d_model": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "d_ff": 8192}
    return llama(**{**sizes, "max_length": 8192, "rope_theta": 500_000.0, "tied_head": True, **fields})


def qwen2_5_0_5b(**fields) -> ModelConfig:
    """Qwen2.5 0.5B: q, k and v biases, tied head, RoPE base 1,000,000."""
    sizes = {"vocab_size": 151_936, "d_model": 896, "n_layers": 24, "n_heads": 14, "n_kv_heads": 2, "d_ff": 4864}
    choices = {"max_length": 32_768, "rope_theta": 1_000_000.0, "norm_eps": 1e-6, "qkv_bias": True, "tied_head": True}
    return llama(**{**sizes, **choices, **fields})


def qwen3_0_6b(**fields) -> ModelConfig:
    """Qwen3 0.6B: QK-norm, head width 128 (not D / N), tied head."""
    sizes = {"vocab_size": 151_936, "d_model": 1024, "n_layers": 28, "n_heads": 16, "n_kv_heads": 8, "d_ff": 3072}
    choices = {"max_length": 40_960, "rope_theta": 1_000_000.0, "norm_eps": 1e-6, "qk_norm": True, "tied_head": True}
    return llama(**{**sizes, "head_dim": 128, **choices, **fields})


def mistral_7b(**fields) -> ModelConfig:
    """Mistral 7B v0.1: GQA, sliding window of 4,096 in every layer."""
    sizes = {"vocab_size": 32_000, "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "d_ff": 14_336}
    return llama(**{**sizes, "max_length": 32_768, "window": 4096, **fields})


def mixtral_8x7b(**fields) -> ModelConfig:
    """Mixtral 8x7B (Jiang et al. 2024): 8 experts, 2 per token, in every layer."""
    sizes = {"vocab_size": 32_000, "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "d_ff": 14_336}
    experts = Experts(n_experts=8, per_token=2, d_ff=14_336)
    return llama(
        **{**sizes, "max_length": 32_768, "rope_theta": 1_000_000.0, "balance_loss": 0.02, "experts": experts, **fields}
    )


def qwen3_moe_30b_a3b(**fields) -> ModelConfig:
    """Qwen3-30B-A3B: 128 experts of 768, 8 per token, in every layer; QK-norm."""
    sizes = {"vocab_size": 151_936, "d_model": 2048, "n_layers": 48, "n_heads": 32, "n_kv_heads": 4, "d_ff": 6144}
    choices = {"head_dim": 128, "max_length": 40_960, "rope_theta": 1_000_000.0, "norm_eps": 1e-6, "qk_norm": True}
    experts = Experts(n_experts=128, per_token=8, d_ff=768)
    return llama(**{**sizes, **choices, "balance_loss": 0.001, "experts": experts, **fields})


def deepseek_v3(**fields) -> ModelConfig:
    """DeepSeek-V3 (DeepSeek-AI 2024), up to its first context of 4,096: latent attention; after three dense layers, 256
    experts, 8 per token from 4 of 8 groups, and a shared one, balanced by a bias."""
    sizes = {"vocab_size": 129_280, "d_model": 7168, "n_layers": 61, "n_heads": 128, "head_dim": 128, "d_ff": 18_432}
    choices = {"max_length": 4096, "norm_eps": 1e-6, "attention": "latent", "dtype": "bfloat16", "param_dtype": "bfloat16"}
    latent = Latent(rank=512, query_rank=1536, rope_dim=64, value_dim=128)
    experts = Experts(
        n_experts=256,
        per_token=8,
        d_ff=2048,
        layers=tuple(range(3, 61)),
        shared=1,
        score="sigmoid",
        scale=2.5,
        groups=8,
        groups_per_token=4,
        selection_bias=True,
    )
    return llama(**{**sizes, **choices, "balance_rate": 0.001, "latent": latent, "experts": experts, **fields})


WITH_SIZES: dict[str, Callable[..., ModelConfig]] = {
    name: f for name, f in list(globals().items()) if inspect.isfunction(f) and f.__module__ == __name__ and name[0] != "_"
}
"""Presets that need no fields, by name."""
del WITH_SIZES["llama"]
