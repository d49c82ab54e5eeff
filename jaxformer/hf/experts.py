"""Mixtures of experts: Mixtral, Qwen3-MoE, DeepSeek-V3."""

import math
from collections.abc import Collection
from typing import Any

from jaxformer.config import Experts, Latent, ModelConfig
from jaxformer.hf.fields import Fields, mscale
from jaxformer.hf.layout import Source
from jaxformer.hf.llama import SHARED, read, tensors, write, write_windows
from jaxformer.hf.tables import Family, Table, linear, normed


def _common(f: Fields) -> None:
    """Fields of other training losses, and of ways to compute the same."""
    for name in ("output_router_logits", "aux_loss_alpha", "seq_aux", "ep_size", "experts_implementation"):
        f(name, None)


def _balance(f: Fields, choices: int) -> float:
    """Our weight for their coefficient: theirs adds up the shares of a token's choices, and takes all layers together."""
    return f.number("router_aux_loss_coef", 0.001) * choices


def _expert_tensors(block: str, names: dict[str, str]) -> Table:
    """Of E experts with a file's tensor each, and of the router."""
    table: Table = {"moe.router": Source(f"{block}.gate.weight", "ED")}
    for ours, theirs in names.items():
        dims = ("D", "F") if ours == "down" else ("F", "D")
        table |= {f"moe.{ours}": Source(f"{block}.experts.{{e}}.{theirs}.weight", "".join(dims))}
    return table


PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def _same(f: Fields, names: tuple[str, ...], default: int) -> int:
    """The value of a field that has several names."""
    found = {name: value for name in names if (value := f(name, None)) is not None}
    if len(set(found.values())) > 1:
        raise ValueError(f"config.json: {found} are several values of one field")
    return next(iter(found.values()), default)


# Mixtral


def _read_mixtral(f: Fields, names: Collection[str]) -> dict[str, Any]:
    _common(f)
    f.only(router_jitter_noise=0.0)
    number = _same(f, ("num_local_experts", "num_experts"), 8)
    choices = f("num_experts_per_tok", 2)
    experts = Experts(n_experts=number, per_token=choices, d_ff=f("intermediate_size"))
    return read(f, window=f("sliding_window", None), experts=experts, balance_loss=_balance(f, choices))


def _write_mixtral(cfg: ModelConfig) -> dict[str, Any]:
    return write(cfg) | {
        "intermediate_size": cfg.experts.d_ff,
        "num_local_experts": cfg.experts.n_experts,
        "num_experts_per_tok": cfg.experts.per_token,
        "router_aux_loss_coef": cfg.execution.balance_loss / cfg.experts.per_token,
        "sliding_window": write_windows(cfg)["sliding_window"],
    }


def _mixtral_tensors(cfg: ModelConfig) -> Table:
    return tensors(cfg, _expert_tensors("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}))


# Qwen3-MoE


def _read_qwen3(f: Fields, names: Collection[str]) -> dict[str, Any]:
    _common(f)
    f("max_window_layers", None)  # its layers slide all or none
    number, step, dense = f("num_hidden_layers"), f("decoder_sparse_step", 1), f("mlp_only_layers", None) or ()
    layers = tuple(i for i in range(number) if i not in dense and (i + 1) % step == 0)
    experts = Experts(
        n_experts=_same(f, ("num_experts", "num_local_experts"), 128),
        per_token=f("num_experts_per_tok", 8),
        d_ff=f("moe_intermediate_size", 768),
        normalize=f("norm_topk_prob", False),
        layers=None if len(layers) == number else layers,
    )
    loss = _balance(f, experts.per_token)
    bias, window = f("attention_bias", False), f("sliding_window", 4096)
    slides = f("use_sliding_window", False)
    window = window if slides else None
    return read(f, qkv_bias=bias, out_bias=bias, qk_norm="head", window=window, experts=experts, balance_loss=loss)


def _write_qwen3(cfg: ModelConfig) -> dict[str, Any]:
    window = write_windows(cfg)["sliding_window"]
    return (
        write(cfg)
        | _write_dense(cfg)
        | {
            "num_experts": cfg.experts.n_experts,
            "num_experts_per_tok": cfg.experts.per_token,
            "moe_intermediate_size": cfg.experts.d_ff,
            "norm_topk_prob": cfg.experts.normalize,
            "router_aux_loss_coef": cfg.execution.balance_loss / cfg.experts.per_token,
            "decoder_sparse_step": 1,
            "attention_bias": cfg.qkv_bias,
            "sliding_window": window,
            "use_sliding_window": window is not None,
        }
    )


def _write_dense(cfg: ModelConfig) -> dict[str, Any]:
    sparse = range(cfg.n_layers) if cfg.experts.layers is None else cfg.experts.layers
    return {"mlp_only_layers": [i for i in range(cfg.n_layers) if i not in sparse]}


def _qwen3_tensors(cfg: ModelConfig) -> Table:
    return tensors(cfg, _expert_tensors("mlp", PROJECTIONS))


# DeepSeek-V3


def _read_deepseek(f: Fields, names: Collection[str]) -> dict[str, Any]:
    _common(f)
    f.only(attention_bias=False, moe_layer_freq=1, topk_method="noaux_tc", scoring_func="sigmoid")
    for name in ("head_dim", "qk_head_dim"):
        f(name, None)
    ahead = _same(f, ("num_nextn_predict_layers", "num_mtp_layers"), 0)
    number = f("num_hidden_layers")
    mtp = ahead > 0 and any(f".layers.{number}." in name for name in names)  # many files leave it out
    if mtp and ahead > 1:
        raise ValueError(f"config.json: num_nextn_predict_layers={ahead} is not supported; supported: 0, 1")
    first = f("first_k_dense_replace", 3)
    experts = Experts(
        n_experts=_same(f, ("n_routed_experts", "num_local_experts"), 256),
        per_token=f("num_experts_per_tok", 8),
        d_ff=f("moe_intermediate_size", 2048),
        layers=tuple(range(first, number)) if first else None,
        shared=f("n_shared_experts", 1),
        score="sigmoid",
        normalize=f("norm_topk_prob", True),
        scale=float(f("routed_scaling_factor", 2.5)),
        groups=f("n_group", 8),
        groups_per_token=f("topk_group", 4),
        selection_bias=True,
    )
    width, rope_dim, heads = f("qk_nope_head_dim", 128), f("qk_rope_head_dim", 64), f("num_attention_heads")
    f.only(num_key_value_heads=heads)
    latent = Latent(
        rank=f("kv_lora_rank", 512),
        query_rank=(f("q_lora_rank", 1536) or 0),
        rope_dim=rope_dim,
        value_dim=f("v_head_dim", 128),
    )
    rope = f.values.get("rope_parameters") or f.values.get("rope_scaling") or {}
    sharper = mscale(rope.get("factor", 1.0), rope["mscale_all_dim"]) if rope.get("mscale_all_dim") else 1.0
    return read(f) | {
        "head_dim": width,
        "n_kv_heads": heads,
        "attention": "latent",
        "latent": latent,
        "experts": experts,
        "mtp": mtp,
        "attention_scale": (width + rope_dim) ** -0.5 * sharper * sharper,
        "rope_layout": "interleaved" if f("rope_interleave", True) else "half",
    }


def _write_deepseek(cfg: ModelConfig) -> dict[str, Any]:
    own, experts = cfg.latent, cfg.experts
    layers = range(cfg.n_layers) if experts.layers is None else experts.layers
    if tuple(layers) != tuple(range(cfg.n_layers - len(layers), cfg.n_layers)):
        raise ValueError("its first layers are dense, and all others have experts")
    return write(cfg) | {
        "head_dim": own.rope_dim,
        "kv_lora_rank": own.rank,
        "q_lora_rank": own.query_rank or None,
        "qk_nope_head_dim": cfg.head_dim,
        "qk_rope_head_dim": own.rope_dim,
        "v_head_dim": own.value_dim,
        "rope_interleave": cfg.rope_layout == "interleaved",
        "rope_scaling": _write_mscale(cfg),
        "n_routed_experts": experts.n_experts,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.d_ff,
        "first_k_dense_replace": cfg.n_layers - len(layers),
        "n_shared_experts": experts.shared,
        "norm_topk_prob": experts.normalize,
        "routed_scaling_factor": experts.scale,
        "n_group": experts.groups,
        "topk_group": experts.groups_per_token,
        "num_nextn_predict_layers": int(cfg.mtp),
    }


def _write_mscale(cfg: ModelConfig) -> dict[str, Any] | None:
    """rope_scaling, with the two numbers that the scale of the scores and the factor of rotated heads come from."""
    values = write(cfg)["rope_scaling"]
    if values is None or cfg.rope_scaling.factor <= 1 or cfg.attention_scale is None:
        return values
    growth = 0.1 * math.log(cfg.rope_scaling.factor)
    sharper = math.sqrt(cfg.attention_scale * math.sqrt(cfg.head_dim + cfg.latent.rope_dim))
    if all_dim := round((sharper - 1) / growth, 9):
        values["mscale_all_dim"] = all_dim
        if (factor := values.pop("attention_factor", None)) is not None:
            values["mscale"] = round((factor * sharper - 1) / growth, 9)
    return values


def _deepseek_tensors(cfg: ModelConfig) -> Table:
    query = {"attention.query": Source("self_attn.q_proj.weight", "(KH)D")}
    if cfg.latent.query_rank:
        query = {
            "attention.query_down": Source("self_attn.q_a_proj.weight", "QD"),
            **normed("attention.query_norm", "self_attn.q_a_layernorm", "Q"),
            "attention.query": Source("self_attn.q_b_proj.weight", "(KH)Q"),
        }
    both = ("self_attn.kv_a_proj_with_mqa.weight", "[R|H]D")
    block: Table = {
        **query,
        "attention.latent": Source(*both, 0),
        "attention.key_rope": Source(*both, 1),
        **normed("attention.latent_norm", "self_attn.kv_a_layernorm", "R"),
        "attention.key_value": Source("self_attn.kv_b_proj.weight", "(KH)R"),
        "attention.out": Source("self_attn.o_proj.weight", "D(KH)"),
        **_expert_tensors("mlp", PROJECTIONS),
        "moe.bias": Source("mlp.gate.e_score_correction_bias", "E"),
    }
    for ours, theirs in PROJECTIONS.items():
        dims = ("D", "F") if ours == "down" else ("F", "D")
        block |= linear(f"moe.shared.{ours}", f"mlp.shared_experts.{theirs}", *dims)
    table = tensors(cfg, block)
    if cfg.mtp:
        name = f"model.layers.{cfg.n_layers}."
        ends = {path: source for path, source in table.items() if path.startswith("decoder.layers.")}
        table |= {
            path.replace("decoder.layers.", "mtp.layer."): source._replace(name=source.name.replace("model.layers.{i}.", name))
            for path, source in ends.items()
        }
        table |= normed("mtp.token_norm", name + "enorm") | normed("mtp.hidden_norm", name + "hnorm")
        table |= normed("mtp.norm", name + "shared_head.norm")
        table |= {
            f"mtp.join_{part}": Source(name + "eh_proj.weight", "F[D|D]", i) for i, part in enumerate(("token", "hidden"))
        }
    return table


def _deepseek_same(cfg: ModelConfig) -> dict[str, str]:
    # Files repeat their tables for the block after the layers.
    block = f"model.layers.{cfg.n_layers}."
    repeated = {block + "embed_tokens.weight": "embedding.token", block + "shared_head.head.weight": "head.kernel"}
    return SHARED["same"] | repeated


FAMILIES = (
    Family("mixtral", "MixtralForCausalLM", _read_mixtral, _write_mixtral, _mixtral_tensors, **SHARED),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", _read_qwen3, _write_qwen3, _qwen3_tensors, **SHARED),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _read_deepseek,
        _write_deepseek,
        _deepseek_tensors,
        prefix="model.",
        same=_deepseek_same,
        buffers=SHARED["buffers"],
    ),
)
