"""GPT-2, GPT-Neo and GPT-NeoX (Pythia)."""

from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.hf.config_reader import ConfigReader
from jaxformer.hf.families.common import PLAIN, SIZES
from jaxformer.hf.families.llama import window_of
from jaxformer.hf.family import Family, Field, Fields, Rule
from jaxformer.hf.layout import Source, Table, attention, joined, layers, linear, normed
from jaxformer.hf.rope import ROPE, rope

PROJECTIONS = ("query", "key", "value")
COMMON: Fields = {
    "norm": "layer",
    "norm_eps": Field("layer_norm_epsilon", 1e-5),
    "mlp": Field("activation_function", "gelu_new", PLAIN),
    "position": "learned",
    "out_bias": True,
    "mlp_bias": True,
    "tied_head": Field("tie_word_embeddings", True),
}
"""The rows that GPT-2 and GPT-Neo share."""

# GPT-2

GPT2: Fields = COMMON | {
    "vocab_size": Field("vocab_size"),
    "d_model": Field("n_embd"),
    "n_layers": Field("n_layer"),
    "n_heads": Field("n_head"),
    "d_ff": Field("n_inner", None),
    "max_length": Field("n_positions"),
    "qkv_bias": True,
    "execution.attention_dropout": Field("attn_pdrop", 0.1),
    "execution.residual_dropout": Field("resid_pdrop", 0.1),
    "execution.embedding_dropout": Field("embd_pdrop", 0.1),
}


def _gpt2_tensors(cfg: ModelConfig) -> Table:
    def stored(path: str, name: str, layout: str, outputs: str) -> Table:  # as (inputs, outputs)
        return {path: Source(f"{name}.weight", layout), f"{path}_bias": Source(f"{name}.bias", outputs)}

    block = (
        joined(tuple(f"attention.{name}" for name in PROJECTIONS), "attn.c_attn.weight", "D[KGH|KH|KH]")
        | joined(tuple(f"attention.{name}_bias" for name in PROJECTIONS), "attn.c_attn.bias", "[KGH|KH|KH]")
        | stored("attention.out", "attn.c_proj", "(KGH)D", "D")
        | stored("mlp.up", "mlp.c_fc", "DF", "F")
        | stored("mlp.down", "mlp.c_proj", "FD", "D")
        | normed("attention_norm", "ln_1")
        | normed("mlp_norm", "ln_2")
    )
    return {
        "embedding.token": Source("transformer.wte.weight", "VD"),
        "decoder.position.table": Source("transformer.wpe.weight", "PD"),
        **layers("decoder", "transformer.h", block),
        **normed("decoder.norm", "transformer.ln_f"),
        "head.kernel": Source("lm_head.weight", "VD"),
    }


# GPT-Neo


def _read_neo_windows(reader: ConfigReader) -> tuple[int | None, ...]:
    n_layers, groups, listed = reader.integer("num_layers"), reader("attention_types", None), reader("attention_layers", None)
    if groups is None:
        groups = [[["global", "local"], n_layers // 2]] if listed is None else [[listed, 1]]
    if sum(len(group) * times for group, times in groups) != n_layers:  # before a list of that length is made
        raise ValueError(f"config.json: attention_types={groups} do not fit num_layers={n_layers}")
    kinds = [kind for group, times in groups for kind in group * times]
    if len(kinds) != n_layers or set(kinds) - {"global", "local"}:
        raise ValueError(f"config.json: attention_types are {kinds}, which do not fit num_layers={n_layers}")
    if listed not in (None, kinds):
        raise ValueError(f"config.json: attention_layers={listed} are not those of attention_types")
    return tuple(reader("window_size", 256) if kind == "local" else None for kind in kinds)


def _write_neo_windows(cfg: ModelConfig) -> dict[str, Any]:
    groups = [[["global" if layer.window is None else "local"], 1] for layer in cfg.layers]
    return {"attention_types": groups, "window_size": window_of(cfg) or 256}


NEO: Fields = (
    COMMON
    | SIZES
    | {
        "n_layers": Field("num_layers"),
        "n_heads": Field("num_heads"),
        "d_ff": Field("intermediate_size", None),
        "window": Rule(_read_neo_windows, _write_neo_windows),
        "attention_scale": 1.0,
        "execution.attention_dropout": Field("attention_dropout", 0.0),
        "execution.residual_dropout": Field("resid_dropout", 0.0),
        "execution.embedding_dropout": Field("embed_dropout", 0.0),
    }
)


def _neo_tensors(cfg: ModelConfig) -> Table:
    block = (
        attention("attention", "attn.attention", o="out_proj")
        | linear("mlp.up", "mlp.c_fc", "F", "D")
        | linear("mlp.down", "mlp.c_proj", "D", "F")
    )
    return _gpt2_tensors(cfg) | layers("decoder", "transformer.h", block)


# GPT-NeoX

NEOX: Fields = SIZES | {
    "norm": "layer",
    "norm_eps": Field("layer_norm_eps", 1e-5),
    "mlp": Field("hidden_act", "gelu", PLAIN),
    "residual": Field("use_parallel_residual", True, {True: "parallel", False: "pre", None: "pre"}),
    "position": "rope",
    "rope_layout": "half",
    "qkv_bias": Field("attention_bias", True),
    "out_bias": Field("attention_bias", True),
    "mlp_bias": True,
    "tied_head": Field("tie_word_embeddings", False),
    "execution.attention_dropout": Field("attention_dropout", 0.0),
    "execution.residual_dropout": Field("hidden_dropout", 0.0),
    ROPE: rope(share="rotary_pct", fraction=0.25, base="rotary_emb_base"),
}


def _neox_tensors(cfg: ModelConfig) -> Table:
    # The projections of each head in turn.
    block = (
        joined(tuple(f"attention.{name}" for name in PROJECTIONS), "attention.query_key_value.weight", "(K3H)D")
        | joined(tuple(f"attention.{name}_bias" for name in PROJECTIONS), "attention.query_key_value.bias", "(K3H)")
        | linear("attention.out", "attention.dense", "D", "(KGH)")
        | linear("mlp.up", "mlp.dense_h_to_4h", "F", "D")
        | linear("mlp.down", "mlp.dense_4h_to_h", "D", "F")
        | normed("attention_norm", "input_layernorm")
        | normed("mlp_norm", "post_attention_layernorm")
    )
    return {
        "embedding.token": Source("gpt_neox.embed_in.weight", "VD"),
        **layers("decoder", "gpt_neox.layers", block),
        **normed("decoder.norm", "gpt_neox.final_layer_norm"),
        "head.kernel": Source("embed_out.weight", "VD"),
    }


FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        GPT2,
        _gpt2_tensors,
        only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        ignored=("n_ctx", "reorder_and_upcast_attn", "summary_.*"),
        prefix="transformer.",
        copies={"lm_head.weight": "embedding.token"},
        buffers=(r".*attn\.(masked_)?bias",),
    ),
    "gpt_neo": Family(
        "GPTNeoForCausalLM",
        NEO,
        _neo_tensors,
        ignored=("summary_.*",),
        prefix="transformer.",
        copies={"lm_head.weight": "embedding.token"},
        buffers=(r".*attn\.attention\.(masked_)?bias",),
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        NEOX,
        _neox_tensors,
        only={"is_decoder": False},
        prefix="gpt_neox.",
        copies={"embed_out.weight": "embedding.token"},
        buffers=(r".*attention\.(masked_)?bias", r".*rotary_emb\.inv_freq"),
    ),
}
