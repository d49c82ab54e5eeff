"""LLaMA and its relatives."""

from collections.abc import Collection
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.hf.fields import Fields, write_rope
from jaxformer.hf.layout import Source
from jaxformer.hf.tables import GATED, Family, Table, attention, inverse, layers, linear, normed, sized, write_sized

# What LLaMA and its relatives share


def read(
    f: Fields, norm_eps: str = "rms_norm_eps", activation: str = "hidden_act", rope: dict[str, Any] | None = None, **own: Any
) -> dict[str, Any]:
    """The fields that LLaMA and its relatives share. rope: keywords of ``Fields.rope``; ``own`` replaces some of ours."""
    f.only(pretraining_tp=1, is_decoder=False, add_cross_attention=False, is_encoder_decoder=False, pruned_heads={})
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
    return values | f.rope(values["max_length"], **(rope or {})) | own


def write(cfg: ModelConfig, activation: str = "hidden_act") -> dict[str, Any]:
    """Back from ``read``."""
    return write_sized(cfg) | {
        "num_key_value_heads": cfg.n_kv_heads,
        "head_dim": cfg.head_dim,
        "rms_norm_eps": cfg.norm_eps,
        activation: inverse(GATED, cfg.mlp),
        "tie_word_embeddings": cfg.tied_head,
        "attention_dropout": cfg.execution.attention_dropout,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": write_rope(cfg.rope_scaling),
    }


def tensors(cfg: ModelConfig, block: Table | None = None) -> Table:
    """LLaMA's tensors; ``block`` replaces or adds some of a layer's."""
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


def windows(f: Fields, n_layers: int, window: int | None, slides: list[bool]) -> int | tuple | None:
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


def write_windows(cfg: ModelConfig) -> dict[str, Any]:
    """Back from ``windows``."""
    windows = [layer.window for layer in cfg.layers]
    widths = {window for window in windows if window is not None}
    if len(widths) > 1:
        raise ValueError(f"it has one width of window, the model {sorted(widths)}")
    types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {"sliding_window": widths.pop() if widths else None, "layer_types": types}


def _read_llama(f: Fields, names: Collection[str]) -> dict[str, Any]:
    bias = f("attention_bias", False)
    return read(f, qkv_bias=bias, out_bias=bias, mlp_bias=f("mlp_bias", False))


def _write_llama(cfg: ModelConfig) -> dict[str, Any]:
    return write(cfg) | {"attention_bias": cfg.qkv_bias, "mlp_bias": cfg.mlp_bias}


def _read_mistral(f: Fields, names: Collection[str]) -> dict[str, Any]:
    f.only(attention_bias=False)
    return read(f, window=f("sliding_window", 4096))


def _write_mistral(cfg: ModelConfig) -> dict[str, Any]:
    return write(cfg) | {"sliding_window": write_windows(cfg)["sliding_window"]}


def _read_qwen(f: Fields, **own: Any) -> dict[str, Any]:
    number = f("num_hidden_layers")
    slides, window = f("use_sliding_window", False), f("sliding_window", 4096)
    first = f("max_window_layers", 28)
    f.only(use_mrope=False)
    own["window"] = windows(f, number, window if slides else None, [bool(slides) and i >= first for i in range(number)])
    return read(f, **own)


def _read_qwen2(f: Fields, names: Collection[str]) -> dict[str, Any]:
    return _read_qwen(f, qkv_bias=True)


def _read_qwen3(f: Fields, names: Collection[str]) -> dict[str, Any]:
    bias = f("attention_bias", False)
    f.values.setdefault("head_dim", 128)
    return _read_qwen(f, qkv_bias=bias, out_bias=bias, qk_norm="head")


def _write_qwen(cfg: ModelConfig) -> dict[str, Any]:
    windows = write_windows(cfg)
    full = windows["layer_types"].count("full_attention")
    if "sliding_attention" in windows["layer_types"][:full]:
        raise ValueError("its layers slide from one layer on, not by turns")
    return write(cfg) | windows | {"use_sliding_window": full < cfg.n_layers, "max_window_layers": full}


def _write_qwen3(cfg: ModelConfig) -> dict[str, Any]:
    return _write_qwen(cfg) | {"attention_bias": cfg.qkv_bias}


def _read_olmo2(f: Fields, names: Collection[str]) -> dict[str, Any]:
    bias = f("attention_bias", False)
    return read(f, qkv_bias=bias, out_bias=bias, qk_norm="all", residual="branch")


def _write_olmo2(cfg: ModelConfig) -> dict[str, Any]:
    return write(cfg) | {"attention_bias": cfg.qkv_bias}


def _olmo2_tensors(cfg: ModelConfig) -> Table:
    norms = normed("attention_norm", "post_attention_layernorm") | normed("mlp_norm", "post_feedforward_layernorm")
    return tensors(cfg, norms)


def _read_phi3(f: Fields, names: Collection[str]) -> dict[str, Any]:
    f("original_max_position_embeddings", None)
    f.only(attention_bias=False)
    own = {"residual_dropout": f("resid_pdrop", 0.0), "embedding_dropout": f("embd_pdrop", 0.0)}
    rope = {"share": "partial_rotary_factor"}
    values = read(f, window=f("sliding_window", None), rope=rope, **own)
    if values["rope_scaling"].kind != "none":
        raise ValueError(f"config.json: rope type {values['rope_scaling'].kind!r} is not one of this family's")
    return values


def _write_phi3(cfg: ModelConfig) -> dict[str, Any]:
    return write(cfg) | {
        "partial_rotary_factor": cfg.rope_fraction,
        "original_max_position_embeddings": cfg.max_length,
        "sliding_window": write_windows(cfg)["sliding_window"],
        "resid_pdrop": cfg.execution.residual_dropout,
        "embd_pdrop": cfg.execution.embedding_dropout,
    }


def _phi3_tensors(cfg: ModelConfig) -> Table:
    fused = {f"attention.{part}": ("self_attn.qkv_proj.weight", "[KGH|KH|KH]D") for part in ("query", "key", "value")}
    fused |= {f"mlp.{part}": ("mlp.gate_up_proj.weight", "[F|F]D") for part in ("gate", "up")}
    parts = {"attention.key": 1, "attention.value": 2, "mlp.up": 1}
    return tensors(cfg, {path: Source(*found, parts.get(path, 0)) for path, found in fused.items()})


def _read_stablelm(f: Fields, names: Collection[str]) -> dict[str, Any]:
    f.only(qk_layernorm=False)
    f("hidden_dropout", 0.0)
    residual = "parallel" if f("use_parallel_residual", False) else "pre"
    own = {"norm": "layer", "qkv_bias": f("use_qkv_bias", False), "residual": residual}
    own |= {"residual_dropout": f("hidden_dropout", 0.0)}
    return read(f, norm_eps="layer_norm_eps", rope={"share": "partial_rotary_factor", "fraction": 0.25}, **own)


def _write_stablelm(cfg: ModelConfig) -> dict[str, Any]:
    values = write(cfg)
    values["layer_norm_eps"] = values.pop("rms_norm_eps")
    return values | {
        "use_qkv_bias": cfg.qkv_bias,
        "use_parallel_residual": cfg.residual == "parallel",
        "partial_rotary_factor": cfg.rope_fraction,
        "hidden_dropout": cfg.execution.residual_dropout,
    }


def _stablelm_tensors(cfg: ModelConfig) -> Table:
    # In its parallel form one norm serves both branches.
    return tensors(cfg, normed("mlp_norm", "input_layernorm") if cfg.residual == "parallel" else {})


SHARED: dict[str, Any] = {
    "prefix": "model.",
    "same": {"lm_head.weight": "embedding.token"},
    "buffers": (r".*rotary_emb\.inv_freq",),
}

FAMILIES = (
    Family("llama", "LlamaForCausalLM", _read_llama, _write_llama, tensors, **SHARED),
    Family("mistral", "MistralForCausalLM", _read_mistral, _write_mistral, tensors, **SHARED),
    Family("qwen2", "Qwen2ForCausalLM", _read_qwen2, _write_qwen, tensors, **SHARED),
    Family("qwen3", "Qwen3ForCausalLM", _read_qwen3, _write_qwen3, tensors, **SHARED),
    Family("olmo2", "Olmo2ForCausalLM", _read_olmo2, _write_olmo2, _olmo2_tensors, **SHARED),
    Family("phi3", "Phi3ForCausalLM", _read_phi3, _write_phi3, _phi3_tensors, **SHARED),
    Family("stablelm", "StableLmForCausalLM", _read_stablelm, _write_stablelm, _stablelm_tensors, **SHARED),
)
