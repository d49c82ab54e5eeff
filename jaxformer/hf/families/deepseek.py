"""DeepSeek-V3: latent attention, and experts in all layers but the first."""

import math
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.hf.config_reader import ConfigReader, number
from jaxformer.hf.families.llama import LLAMA, relative, tensors
from jaxformer.hf.families.mixtral import IGNORED, expert_tensors
from jaxformer.hf.family import Field, Fields, Rule
from jaxformer.hf.layout import Source, Table, gated, joined, linear, normed
from jaxformer.hf.rope import ROPE, mscale, read_rope, write_rope


def _read_scale(reader: ConfigReader) -> float:
    rope = reader.object("rope_parameters") or reader.object("rope_scaling") or {}
    all_dim = rope.get("mscale_all_dim")
    sharper = mscale(rope.get("factor", 1.0), all_dim) if all_dim else 1.0
    width = reader.integer("qk_nope_head_dim", 128) + reader.integer("qk_rope_head_dim", 64)
    return width**-0.5 * sharper * sharper


def _write_rope(cfg: ModelConfig) -> dict[str, Any]:
    """The two numbers in rope_scaling that the scale of the scores and the factor of rotated heads come from are added."""
    values = write_rope(cfg)
    rope = values["rope_scaling"]
    if rope is None or cfg.rope_scaling.factor <= 1 or cfg.attention_scale is None:
        return values
    growth = 0.1 * math.log(cfg.rope_scaling.factor)
    sharper = math.sqrt(cfg.attention_scale * math.sqrt(cfg.head_dim + cfg.latent.rope_dim))
    if all_dim := round((sharper - 1) / growth, 9):
        rope["mscale_all_dim"] = all_dim
        if (factor := rope.pop("attention_factor", None)) is not None:
            rope["mscale"] = round((factor * sharper - 1) / growth, 9)
    return values


def _read_sparse_layers(reader: ConfigReader) -> tuple[int, ...] | None:
    dense = reader.integer("first_k_dense_replace", 3)
    return tuple(range(dense, reader.integer("num_hidden_layers"))) if dense else None


def _write_sparse_layers(cfg: ModelConfig) -> dict[str, Any]:
    sparse = [bool(layer.experts.n_experts) for layer in cfg.layers]
    if sparse != sorted(sparse):
        raise ValueError("this family has dense first layers and experts in all others")
    return {"first_k_dense_replace": sparse.count(False)}


def _read_mtp(reader: ConfigReader) -> bool:
    ahead = number("num_nextn_predict_layers", reader.agreed(("num_nextn_predict_layers", "num_mtp_layers"), 0))
    block = f".layers.{reader('num_hidden_layers')}."
    if not ahead or not any(block in name for name in reader.tensors):  # many files leave it out
        return False
    if ahead > 1:
        raise ValueError(f"config.json: num_nextn_predict_layers={ahead:g} is not supported; supported: 0, 1")
    return True


FIELDS: Fields = {
    "attention": "latent",
    "n_kv_heads": Rule(lambda reader: reader("num_attention_heads"), lambda cfg: {"num_key_value_heads": cfg.n_kv_heads}),
    "head_dim": Field("qk_nope_head_dim", 128),
    "latent.rank": Field("kv_lora_rank", 512),
    "latent.query_rank": Rule(
        lambda reader: reader("q_lora_rank", 1536) or 0, lambda cfg: {"q_lora_rank": cfg.latent.query_rank or None}
    ),
    "latent.rope_dim": Rule(
        lambda reader: reader("qk_rope_head_dim", 64),
        lambda cfg: {"qk_rope_head_dim": cfg.latent.rope_dim, "head_dim": cfg.latent.rope_dim},
    ),
    "latent.value_dim": Field("v_head_dim", 128),
    "attention_scale": Rule(_read_scale),
    "rope_layout": Field("rope_interleave", True, {True: "interleaved", False: "half", None: "half"}),
    ROPE: Rule(read_rope, _write_rope),
    "experts.n_experts": Field("n_routed_experts", 256, aliases=("num_local_experts",)),
    "experts.per_token": Field("num_experts_per_tok", 8),
    "experts.d_ff": Field("moe_intermediate_size", 2048),
    "experts.layers": Rule(_read_sparse_layers, _write_sparse_layers),
    "experts.shared": Field("n_shared_experts", 1),
    "experts.score": "sigmoid",
    "experts.normalize": Field("norm_topk_prob", True),
    "experts.scale": Field("routed_scaling_factor", 2.5),
    "experts.groups": Field("n_group", 8),
    "experts.groups_per_token": Field("topk_group", 4),
    "experts.selection_bias": True,
    "mtp": Rule(_read_mtp, lambda cfg: {"num_nextn_predict_layers": int(cfg.mtp)}),
}


def _tensors(cfg: ModelConfig) -> Table:
    query = {"attention.query": Source("self_attn.q_proj.weight", "(KH)D")}
    if cfg.latent.query_rank:
        query = {
            "attention.query_down": Source("self_attn.q_a_proj.weight", "QD"),
            **normed("attention.query_norm", "self_attn.q_a_layernorm", "Q"),
            "attention.query": Source("self_attn.q_b_proj.weight", "(KH)Q"),
        }
    block: Table = {
        **query,
        **joined(("attention.latent", "attention.key_rope"), "self_attn.kv_a_proj_with_mqa.weight", "[R|H]D"),
        **normed("attention.latent_norm", "self_attn.kv_a_layernorm", "R"),
        "attention.key_value": Source("self_attn.kv_b_proj.weight", "(KH)R"),
        **linear("attention.out", "self_attn.o_proj", "D", "(KH)"),
        **expert_tensors("mlp"),
        "moe.bias": Source("mlp.gate.e_score_correction_bias", "E"),
        **gated("moe.shared", "mlp.shared_experts"),
    }
    table = tensors(cfg, block)
    return table | _mtp_tensors(f"model.layers.{cfg.n_layers}", table)


def _mtp_tensors(name: str, table: Table) -> Table:
    """A file keeps the block of multi-token prediction as one more layer."""
    layer = {
        path.replace("decoder.layers.", "mtp.layer."): source._replace(name=source.name.replace("model.layers.{i}", name))
        for path, source in table.items()
        if path.startswith("decoder.layers.")
    }
    norms = (
        normed("mtp.token_norm", f"{name}.enorm")
        | normed("mtp.hidden_norm", f"{name}.hnorm")
        | normed("mtp.norm", f"{name}.shared_head.norm")
    )
    return layer | norms | joined(("mtp.join_token", "mtp.join_hidden"), f"{name}.eh_proj.weight", "O[D|D]")


FAMILIES = {
    "deepseek_v3": relative(
        "DeepseekV3ForCausalLM",
        FIELDS,
        only={
            "attention_bias": False,
            "moe_layer_freq": 1,
            "num_key_value_heads": Field("num_attention_heads"),
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        ignored=(*IGNORED, "head_dim", "qk_head_dim"),
        tensors=_tensors,
        # Files repeat their tables for the block after the layers.
        copies=LLAMA.copies
        | {
            "model.layers.{n_layers}.embed_tokens.weight": "embedding.token",
            "model.layers.{n_layers}.shared_head.head.weight": "head.kernel",
        },
    ),
}
