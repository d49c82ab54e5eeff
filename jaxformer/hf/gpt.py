"""GPT-2, GPT-Neo and GPT-NeoX (Pythia)."""

from collections.abc import Collection
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.hf.fields import Fields, write_rope
from jaxformer.hf.layout import Source
from jaxformer.hf.tables import PLAIN, Family, Table, attention, inverse, layers, linear, normed, sized, write_sized


def _read_gpt2(f: Fields, names: Collection[str]) -> dict[str, Any]:
    f.only(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    for name in ("n_ctx", "reorder_and_upcast_attn", *(n for n in f.values if n.startswith("summary_"))):
        f(name, None)
    return {
        "vocab_size": f("vocab_size"),
        "d_model": f("n_embd"),
        "n_layers": f("n_layer"),
        "n_heads": f("n_head"),
        "d_ff": f("n_inner", None) or 4 * f("n_embd"),
        "max_length": f("n_positions"),
        "norm": "layer",
        "norm_eps": f("layer_norm_epsilon", 1e-5),
        "mlp": f.choice("activation_function", PLAIN, "gelu_new"),
        "position": "learned",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "tied_head": f("tie_word_embeddings", True),
        "attention_dropout": f("attn_pdrop", 0.1),
        "residual_dropout": f("resid_pdrop", 0.1),
        "embedding_dropout": f("embd_pdrop", 0.1),
    }


def _write_gpt2(cfg: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": cfg.vocab_size,
        "n_embd": cfg.d_model,
        "n_layer": cfg.n_layers,
        "n_head": cfg.n_heads,
        "n_inner": cfg.d_ff,
        "n_positions": cfg.max_length,
        "layer_norm_epsilon": cfg.norm_eps,
        "activation_function": inverse(PLAIN, cfg.mlp),
        "tie_word_embeddings": cfg.tied_head,
        "attn_pdrop": cfg.execution.attention_dropout,
        "resid_pdrop": cfg.execution.residual_dropout,
        "embd_pdrop": cfg.execution.embedding_dropout,
    }


def _gpt2_tensors(cfg: ModelConfig) -> Table:
    def stored(path, name, layout, bias):  # as (in, out)
        return {path: Source(f"{name}.weight", layout), f"{path}_bias": Source(f"{name}.bias", bias)}

    block: Table = {
        **stored("attention.out", "attn.c_proj", "(KGH)D", "D"),
        **stored("mlp.up", "mlp.c_fc", "DF", "F"),
        **stored("mlp.down", "mlp.c_proj", "FD", "D"),
        **normed("attention_norm", "ln_1"),
        **normed("mlp_norm", "ln_2"),
    }
    for number, part in enumerate(("query", "key", "value")):
        block[f"attention.{part}"] = Source("attn.c_attn.weight", "D[KGH|KH|KH]", number)
        block[f"attention.{part}_bias"] = Source("attn.c_attn.bias", "[KGH|KH|KH]", number)
    return {
        "embedding.token": Source("transformer.wte.weight", "VD"),
        "decoder.position.table": Source("transformer.wpe.weight", "PD"),
        **layers("decoder", "transformer.h", block),
        **normed("decoder.norm", "transformer.ln_f"),
        "head.kernel": Source("lm_head.weight", "VD"),
    }


def _read_neo(f: Fields, names: Collection[str]) -> dict[str, Any]:
    heads, width, number = f("num_heads"), f("hidden_size"), f("num_layers")
    for name in [n for n in f.values if n.startswith("summary_")]:
        f(name, None)
    groups, listed = f("attention_types", None), f("attention_layers", None)
    if groups is None:
        groups = [[["global", "local"], number // 2]] if listed is None else [[listed, 1]]
    kinds = [kind for group, times in groups for kind in group * times]
    if len(kinds) != number or set(kinds) - {"global", "local"}:
        raise ValueError(f"config.json: attention_types are {kinds}, for num_layers={number}")
    if listed not in (None, kinds):
        raise ValueError(f"config.json: attention_layers={listed} are not those of attention_types")
    return {
        "vocab_size": f("vocab_size"),
        "d_model": width,
        "n_layers": number,
        "n_heads": heads,
        "d_ff": f("intermediate_size", None) or 4 * width,
        "max_length": f("max_position_embeddings"),
        "window": tuple(f("window_size", 256) if kind == "local" else None for kind in kinds),
        "norm": "layer",
        "norm_eps": f("layer_norm_epsilon", 1e-5),
        "mlp": f.choice("activation_function", PLAIN, "gelu_new"),
        "position": "learned",
        "attention_scale": 1.0,
        "out_bias": True,
        "mlp_bias": True,
        "tied_head": f("tie_word_embeddings", True),
        "attention_dropout": f("attention_dropout", 0.0),
        "residual_dropout": f("resid_dropout", 0.0),
        "embedding_dropout": f("embed_dropout", 0.0),
    }


def _write_neo(cfg: ModelConfig) -> dict[str, Any]:
    windows = [layer.window for layer in cfg.layers]
    widths = {window for window in windows if window is not None}
    if len(widths) > 1:
        raise ValueError(f"it has one width of window, the model {sorted(widths)}")
    return {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "num_layers": cfg.n_layers,
        "num_heads": cfg.n_heads,
        "intermediate_size": cfg.d_ff,
        "max_position_embeddings": cfg.max_length,
        "attention_types": [[["global" if window is None else "local"], 1] for window in windows],
        "window_size": widths.pop() if widths else 256,
        "layer_norm_epsilon": cfg.norm_eps,
        "activation_function": inverse(PLAIN, cfg.mlp),
        "tie_word_embeddings": cfg.tied_head,
        "attention_dropout": cfg.execution.attention_dropout,
        "resid_dropout": cfg.execution.residual_dropout,
        "embed_dropout": cfg.execution.embedding_dropout,
    }


def _neo_tensors(cfg: ModelConfig) -> Table:
    block: Table = {
        **attention("attention", "attn.attention", o="out_proj"),
        **linear("mlp.up", "mlp.c_fc", "F", "D"),
        **linear("mlp.down", "mlp.c_proj", "D", "F"),
        **normed("attention_norm", "ln_1"),
        **normed("mlp_norm", "ln_2"),
    }
    return _gpt2_tensors(cfg) | layers("decoder", "transformer.h", block)


def _read_neox(f: Fields, names: Collection[str]) -> dict[str, Any]:
    bias = f("attention_bias", True)
    f.only(is_decoder=False)
    values = sized(
        f,
        norm="layer",
        norm_eps=f("layer_norm_eps", 1e-5),
        mlp=f.choice("hidden_act", PLAIN, "gelu"),
        residual="parallel" if f("use_parallel_residual", True) else "pre",
        position="rope",
        rope_layout="half",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        tied_head=f("tie_word_embeddings", False),
        attention_dropout=f("attention_dropout", 0.0),
        residual_dropout=f("hidden_dropout", 0.0),
    )
    return values | f.rope(values["max_length"], share="rotary_pct", fraction=0.25, base="rotary_emb_base")


def _write_neox(cfg: ModelConfig) -> dict[str, Any]:
    return write_sized(cfg) | {
        "layer_norm_eps": cfg.norm_eps,
        "hidden_act": inverse(PLAIN, cfg.mlp),
        "use_parallel_residual": cfg.residual == "parallel",
        "attention_bias": cfg.qkv_bias,
        "tie_word_embeddings": cfg.tied_head,
        "attention_dropout": cfg.execution.attention_dropout,
        "hidden_dropout": cfg.execution.residual_dropout,
        "rotary_pct": cfg.rope_fraction,
        "rotary_emb_base": cfg.rope_theta,
        "rope_scaling": write_rope(cfg.rope_scaling),
    }


def _neox_tensors(cfg: ModelConfig) -> Table:
    block: Table = {
        **linear("attention.out", "attention.dense", "D", "(KGH)"),
        **linear("mlp.up", "mlp.dense_h_to_4h", "F", "D"),
        **linear("mlp.down", "mlp.dense_4h_to_h", "D", "F"),
        **normed("attention_norm", "input_layernorm"),
        **normed("mlp_norm", "post_attention_layernorm"),
    }
    for number, part in enumerate(("query", "key", "value")):  # of each head in turn
        block[f"attention.{part}"] = Source("attention.query_key_value.weight", "(K3H)D", number)
        block[f"attention.{part}_bias"] = Source("attention.query_key_value.bias", "(K3H)", number)
    return {
        "embedding.token": Source("gpt_neox.embed_in.weight", "VD"),
        **layers("decoder", "gpt_neox.layers", block),
        **normed("decoder.norm", "gpt_neox.final_layer_norm"),
        "head.kernel": Source("embed_out.weight", "VD"),
    }


FAMILIES = (
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        _read_gpt2,
        _write_gpt2,
        _gpt2_tensors,
        prefix="transformer.",
        same={"lm_head.weight": "embedding.token"},
        buffers=(r".*attn\.(masked_)?bias",),
    ),
    Family(
        "gpt_neo",
        "GPTNeoForCausalLM",
        _read_neo,
        _write_neo,
        _neo_tensors,
        prefix="transformer.",
        same={"lm_head.weight": "embedding.token"},
        buffers=(r".*attn\.attention\.(masked_)?bias",),
    ),
    Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        _read_neox,
        _write_neox,
        _neox_tensors,
        prefix="gpt_neox.",
        same={"embed_out.weight": "embedding.token"},
        buffers=(r".*attention\.(masked_)?bias", r".*rotary_emb\.inv_freq"),
    ),
)
