"""LLaMA and its relatives, GPT-2 and GPT-NeoX."""

from collections.abc import Collection
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.hf.fields import Fields, write_rope
from jaxformer.hf.layout import Source
from jaxformer.hf.tables import (
    GATED,
    PLAIN,
    Family,
    Table,
    attention,
    inverse,
    layers,
    linear,
    normed,
    sized,
    write_sized,
)

# What LLaMA and its relatives share


def _read(f: Fields, norm_eps: str = "rms_norm_eps", activation: str = "hidden_act", **own: Any) -> dict[str, Any]:
    f.only(pretraining_tp=1, is_decoder=False, add_cross_attention=False)
    heads, width = f("num_attention_heads"), f("hidden_size")
    values = sized(
        f,
        n_kv_heads=f("num_key_value_heads", None) or heads,
        head_dim=f("head_dim", None) or width // heads,
        norm="rms",
        norm_eps=f(norm_eps),
        mlp=f.choice(activation, GATED, "silu"),
        tied_head=f("tie_word_embeddings", False),
        attention_dropout=f("attention_dropout", 0.0),
        position="rope",
        rope_layout="half",
    )
    return values | f.rope(values["max_length"]) | own


def _write(cfg: ModelConfig, activation: str = "hidden_act") -> dict[str, Any]:
    return write_sized(cfg) | {
        "num_key_value_heads": cfg.n_kv_heads,
        "head_dim": cfg.head_dim,
        "rms_norm_eps": cfg.norm_eps,
        activation: inverse(GATED, cfg.mlp),
        "tie_word_embeddings": cfg.tied_head,
        "attention_dropout": cfg.attention_dropout,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": write_rope(cfg.rope_scaling),
    }


def _tensors(cfg: ModelConfig, block: Table | None = None) -> Table:
    gated = {f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up")}
    base: Table = {
        **attention("attention", "self_attn"),
        **normed("attention_norm", "input_layernorm"),
        **normed("mlp_norm", "post_attention_layernorm"),
        **linear("mlp.down", "mlp.down_proj", "D", "F"),
    }
    for path, name in gated.items():
        base |= linear(path, name, "F", "D")
    for part, dims in (("query", "(KGH)"), ("key", "(KH)")):
        base |= normed(f"attention.{part}_norm", f"self_attn.{part[0]}_norm", "H" if cfg.qk_norm == "head" else dims)
    return {
        "embedding.token": Source("model.embed_tokens.weight", "VD"),
        **layers("decoder", "model.layers", base | (block or {})),
        **normed("decoder.norm", "model.norm"),
        "head.kernel": Source("lm_head.weight", "VD"),
    }


def _windows(f: Fields, n_layers: int, window: int | None, slides: list[bool]) -> int | tuple | None:
    """The windows of layers: by ``layer_types`` where that is given, else by ``slides``."""
    types = f("layer_types", None)
    if types is not None:
        kinds = {"sliding_attention": True, "full_attention": False}
        if len(types) != n_layers or any(kind not in kinds for kind in types):
            raise ValueError(
                f"config.json: layer_types={types!r} must name full_attention or sliding_attention for {n_layers} layers"
            )
        slides = [kinds[kind] for kind in types]
    if any(slides) and window is None:
        raise ValueError("config.json: layers slide, but there is no sliding_window")
    windows = tuple(window if slide else None for slide in slides)
    return windows[0] if len(set(windows)) == 1 else windows


def _write_windows(cfg: ModelConfig) -> dict[str, Any]:
    windows = [layer.window for layer in cfg.layers]
    widths = {window for window in windows if window is not None}
    if len(widths) > 1:
        raise ValueError(f"it has one width of window, the model {sorted(widths)}")
    types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {"sliding_window": widths.pop() if widths else None, "layer_types": types}


def _read_llama(f: Fields, names: Collection[str]) -> dict[str, Any]:
    bias = f("attention_bias", False)
    return _read(f, qkv_bias=bias, out_bias=bias, mlp_bias=f("mlp_bias", False))


def _write_llama(cfg: ModelConfig) -> dict[str, Any]:
    return _write(cfg) | {"attention_bias": cfg.qkv_bias, "mlp_bias": cfg.mlp_bias}


def _read_mistral(f: Fields, names: Collection[str]) -> dict[str, Any]:
    return _read(f, window=f("sliding_window", 4096))


def _write_mistral(cfg: ModelConfig) -> dict[str, Any]:
    return _write(cfg) | {"sliding_window": _write_windows(cfg)["sliding_window"]}


def _read_qwen(f: Fields, **own: Any) -> dict[str, Any]:
    number = f("num_hidden_layers")
    slides, window = f("use_sliding_window", False), f("sliding_window", 4096)
    first = f("max_window_layers", 28)
    own["window"] = _windows(f, number, window if slides else None, [bool(slides) and i >= first for i in range(number)])
    return _read(f, **own)


def _read_qwen2(f: Fields, names: Collection[str]) -> dict[str, Any]:
    return _read_qwen(f, qkv_bias=True)


def _read_qwen3(f: Fields, names: Collection[str]) -> dict[str, Any]:
    bias = f("attention_bias", False)
    f.values.setdefault("head_dim", 128)
    return _read_qwen(f, qkv_bias=bias, out_bias=bias, qk_norm="head")


def _write_qwen(cfg: ModelConfig) -> dict[str, Any]:
    windows = _write_windows(cfg)
    full = windows["layer_types"].count("full_attention")
    if "sliding_attention" in windows["layer_types"][:full]:
        raise ValueError("its layers slide from one layer on, not by turns")
    return _write(cfg) | windows | {"use_sliding_window": full < cfg.n_layers, "max_window_layers": full}


def _write_qwen3(cfg: ModelConfig) -> dict[str, Any]:
    return _write_qwen(cfg) | {"attention_bias": cfg.qkv_bias}


def _read_olmo2(f: Fields, names: Collection[str]) -> dict[str, Any]:
    bias = f("attention_bias", False)
    return _read(f, qkv_bias=bias, out_bias=bias, qk_norm="all", residual="branch")


def _write_olmo2(cfg: ModelConfig) -> dict[str, Any]:
    return _write(cfg) | {"attention_bias": cfg.qkv_bias}


def _olmo2_tensors(cfg: ModelConfig) -> Table:
    norms = normed("attention_norm", "post_attention_layernorm") | normed("mlp_norm", "post_feedforward_layernorm")
    return _tensors(cfg, norms)


def _read_phi3(f: Fields, names: Collection[str]) -> dict[str, Any]:
    f("original_max_position_embeddings", None)
    own = {"residual_dropout": f("resid_pdrop", 0.0), "embedding_dropout": f("embd_pdrop", 0.0)}
    return _read(f, window=f("sliding_window", None), **own)


def _write_phi3(cfg: ModelConfig) -> dict[str, Any]:
    return _write(cfg) | {
        "partial_rotary_factor": cfg.rope_fraction,
        "original_max_position_embeddings": cfg.max_length,
        "sliding_window": _write_windows(cfg)["sliding_window"],
        "resid_pdrop": cfg.residual_dropout,
        "embd_pdrop": cfg.embedding_dropout,
    }


def _phi3_tensors(cfg: ModelConfig) -> Table:
    fused = {f"attention.{part}": ("self_attn.qkv_proj.weight", "[KGH|KH|KH]D") for part in ("query", "key", "value")}
    fused |= {f"mlp.{part}": ("mlp.gate_up_proj.weight", "[F|F]D") for part in ("gate", "up")}
    parts = {"attention.key": 1, "attention.value": 2, "mlp.up": 1}
    return _tensors(cfg, {path: Source(*found, parts.get(path, 0)) for path, found in fused.items()})


def _read_stablelm(f: Fields, names: Collection[str]) -> dict[str, Any]:
    f.only(qk_layernorm=False)
    f("hidden_dropout", 0.0)
    residual = "parallel" if f("use_parallel_residual", False) else "pre"
    own = {"norm": "layer", "qkv_bias": f("use_qkv_bias", False), "residual": residual}
    own |= {"residual_dropout": f("hidden_dropout", 0.0)}
    return _read(f, norm_eps="layer_norm_eps", **own) | f.rope(f("max_position_embeddings"), fraction=0.25)


def _write_stablelm(cfg: ModelConfig) -> dict[str, Any]:
    values = _write(cfg)
    values["layer_norm_eps"] = values.pop("rms_norm_eps")
    return values | {
        "use_qkv_bias": cfg.qkv_bias,
        "use_parallel_residual": cfg.residual == "parallel",
        "partial_rotary_factor": cfg.rope_fraction,
        "hidden_dropout": cfg.residual_dropout,
    }


def _stablelm_tensors(cfg: ModelConfig) -> Table:
    # In its parallel form one norm serves both branches.
    return _tensors(cfg, normed("mlp_norm", "input_layernorm") if cfg.residual == "parallel" else {})


# Gemma


def _read_gemma(f: Fields, names: Collection[str]) -> dict[str, Any]:
    f.only(use_bidirectional_attention=False)
    bias = f("attention_bias", False)
    # "gelu" in its first files meant the tanh form all the same
    choices = {None: "geglu_tanh"} | GATED | {"gelu": "geglu_tanh"}
    newer = f.values.get("hidden_activation")
    mlp = f.choice("hidden_activation" if newer else "hidden_act", choices, None)
    f("hidden_act", None)
    f.values["hidden_activation"] = f.values.get("hidden_activation") or "gelu_pytorch_tanh"
    values = _read(f, activation="hidden_activation", qkv_bias=bias, out_bias=bias)
    head = {"head_dim": f("head_dim", 256), "tied_head": f("tie_word_embeddings", True)}
    return values | head | {"norm": "rms_plus", "scale_embedding": True, "mlp": mlp}


def _write_gemma(cfg: ModelConfig) -> dict[str, Any]:
    values = _write(cfg, activation="hidden_activation")
    return values | {"hidden_act": values["hidden_activation"], "attention_bias": cfg.qkv_bias}


def _read_gemma2(f: Fields, names: Collection[str], slides=None) -> dict[str, Any]:
    number = f("num_hidden_layers")
    slides = [i % 2 == 0 for i in range(number)] if slides is None else slides
    return _read_gemma(f, names) | {
        "residual": "sandwich",
        "attention_scale": f("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": f("attn_logit_softcapping", 50.0),
        "logit_softcap": f("final_logit_softcapping", 30.0),
        "window": _windows(f, number, f("sliding_window", 4096), slides),
    }


def _write_gemma2(cfg: ModelConfig) -> dict[str, Any]:
    values = _write_gemma(cfg)
    values.pop("hidden_act")
    scale = cfg.head_dim**-0.5 if cfg.attention_scale is None else cfg.attention_scale
    exact = scale**-2
    return (
        values
        | _write_windows(cfg)
        | {
            "query_pre_attn_scalar": round(exact) if round(exact) ** -0.5 == scale else exact,
            "attn_logit_softcapping": cfg.attention_softcap,
            "final_logit_softcapping": cfg.logit_softcap,
        }
    )


def _read_gemma3(f: Fields, names: Collection[str]) -> dict[str, Any]:
    number, period = f("num_hidden_layers"), f("sliding_window_pattern", None) or f("_sliding_window_pattern", 6)
    f("_sliding_window_pattern", None)
    f.values.setdefault("attn_logit_softcapping", None)
    f.values.setdefault("final_logit_softcapping", None)
    if "rope_parameters" not in f.values:
        f.values.setdefault("rope_theta", 1_000_000.0)
    values = _read_gemma2(f, names, [(i + 1) % period > 0 for i in range(number)]) | {"qk_norm": "head"}
    values |= f.rope(values["max_length"], kind="full_attention")
    local = f("rope_local_base_freq", 10_000.0)
    if "rope_parameters" in f.values:
        own = f.rope(values["max_length"], kind="sliding_attention")
        if own["rope_scaling"].kind != "none":
            raise ValueError("config.json: rope_parameters of sliding_attention are scaled, which is not supported")
        local = own["rope_theta"]
    return values | {"rope_local_theta": float(local)}


def _write_gemma3(cfg: ModelConfig) -> dict[str, Any]:
    values = _write_gemma2(cfg)
    local = cfg.rope_theta if cfg.rope_local_theta is None else cfg.rope_local_theta
    scaling = values.pop("rope_scaling")
    # Versions before 5 read the first three, later ones rope_parameters.
    both = {"rope_theta": cfg.rope_theta, "rope_local_base_freq": local, "rope_scaling": scaling}
    full = {"rope_type": "default"} | (scaling or {}) | {"rope_theta": cfg.rope_theta}
    return (
        values
        | both
        | {"rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": local}}}
    )


def _sandwich_tensors(cfg: ModelConfig) -> Table:
    return _tensors(
        cfg,
        normed("attention_out_norm", "post_attention_layernorm")
        | normed("mlp_norm", "pre_feedforward_layernorm")
        | normed("mlp_out_norm", "post_feedforward_layernorm"),
    )


# GPT


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
        "attn_pdrop": cfg.attention_dropout,
        "resid_pdrop": cfg.residual_dropout,
        "embd_pdrop": cfg.embedding_dropout,
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
    for name in ("attention_layers", *(n for n in f.values if n.startswith("summary_"))):
        f(name, None)
    kinds = [kind for group, times in f("attention_types", [[["global", "local"], number // 2]]) for kind in group * times]
    if len(kinds) != number or set(kinds) - {"global", "local"}:
        raise ValueError(f"config.json: attention_types are {kinds}, for num_layers={number}")
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
        "attention_dropout": cfg.attention_dropout,
        "resid_dropout": cfg.residual_dropout,
        "embed_dropout": cfg.embedding_dropout,
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
    return values | f.rope(values["max_length"], fraction=0.25)


def _write_neox(cfg: ModelConfig) -> dict[str, Any]:
    return write_sized(cfg) | {
        "layer_norm_eps": cfg.norm_eps,
        "hidden_act": inverse(PLAIN, cfg.mlp),
        "use_parallel_residual": cfg.residual == "parallel",
        "attention_bias": cfg.qkv_bias,
        "tie_word_embeddings": cfg.tied_head,
        "attention_dropout": cfg.attention_dropout,
        "hidden_dropout": cfg.residual_dropout,
        "rotary_pct": cfg.rope_fraction,
        "partial_rotary_factor": cfg.rope_fraction,
        "rotary_emb_base": cfg.rope_theta,
        "rope_theta": cfg.rope_theta,
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


_LLAMA: dict[str, Any] = {
    "prefix": "model.",
    "same": {"lm_head.weight": "embedding.token"},
    "buffers": (r".*rotary_emb\.inv_freq",),
}

FAMILIES = (
    Family("llama", "LlamaForCausalLM", _read_llama, _write_llama, _tensors, **_LLAMA),
    Family("mistral", "MistralForCausalLM", _read_mistral, _write_mistral, _tensors, **_LLAMA),
    Family("qwen2", "Qwen2ForCausalLM", _read_qwen2, _write_qwen, _tensors, **_LLAMA),
    Family("qwen3", "Qwen3ForCausalLM", _read_qwen3, _write_qwen3, _tensors, **_LLAMA),
    Family("olmo2", "Olmo2ForCausalLM", _read_olmo2, _write_olmo2, _olmo2_tensors, **_LLAMA),
    Family("phi3", "Phi3ForCausalLM", _read_phi3, _write_phi3, _phi3_tensors, **_LLAMA),
    Family("stablelm", "StableLmForCausalLM", _read_stablelm, _write_stablelm, _stablelm_tensors, **_LLAMA),
    Family("gemma", "GemmaForCausalLM", _read_gemma, _write_gemma, _tensors, **_LLAMA),
    Family("gemma2", "Gemma2ForCausalLM", _read_gemma2, _write_gemma2, _sandwich_tensors, **_LLAMA),
    Family("gemma3_text", "Gemma3ForCausalLM", _read_gemma3, _write_gemma3, _sandwich_tensors, **_LLAMA),
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
