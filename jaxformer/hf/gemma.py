"""Gemma 1, 2 and 3 (text): LLaMA's tensors, other norms, windows by turns."""

from collections.abc import Collection
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.hf.fields import Fields
from jaxformer.hf.llama import SHARED, read, tensors, windows, write, write_windows
from jaxformer.hf.tables import GATED, Family, Table, normed


def _read_gemma(f: Fields, names: Collection[str], older: bool = True, rope: dict[str, Any] | None = None) -> dict[str, Any]:
    """older: hidden_act is its name for the activation too."""
    f.only(use_bidirectional_attention=False)
    bias = f("attention_bias", False)
    newer = f.choice("hidden_activation", {None: None} | GATED, None)
    # "gelu" in the first files meant the tanh form all the same.
    act = f.choice("hidden_act", {None: None} | GATED | {"gelu": "geglu_tanh"}, None)
    if act and newer and act != newer or (act and not older and act != (newer or "geglu_tanh")):
        raise ValueError(f"config.json: hidden_act={f('hidden_act')!r} and hidden_activation={f('hidden_activation')!r} differ")
    f.values["hidden_activation"] = f.values.get("hidden_activation") or "gelu_pytorch_tanh"
    values = read(f, activation="hidden_activation", rope=rope, qkv_bias=bias, out_bias=bias)
    head = {"head_dim": f("head_dim", 256), "tied_head": f("tie_word_embeddings", True)}
    return values | head | {"norm": "rms_plus", "scale_embedding": True, "mlp": newer or act or "geglu_tanh"}


def _write_gemma(cfg: ModelConfig) -> dict[str, Any]:
    values = write(cfg, activation="hidden_activation")
    if cfg.mlp == "geglu_tanh":
        values["hidden_activation"] = "gelu_pytorch_tanh"  # of several names for it the one that published files have
    return values | {"hidden_act": values["hidden_activation"], "attention_bias": cfg.qkv_bias}


def _read_gemma2(f: Fields, names: Collection[str], slides=None, rope: dict[str, Any] | None = None) -> dict[str, Any]:
    number = f("num_hidden_layers")
    slides = [i % 2 == 0 for i in range(number)] if slides is None else slides
    return _read_gemma(f, names, older=False, rope=rope) | {
        "residual": "sandwich",
        "attention_scale": f.number("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": f("attn_logit_softcapping", 50.0),
        "logit_softcap": f("final_logit_softcapping", 30.0),
        "window": windows(f, number, f("sliding_window", 4096), slides),
    }


def _write_gemma2(cfg: ModelConfig) -> dict[str, Any]:
    values = _write_gemma(cfg)
    values.pop("hidden_act")
    scale = cfg.head_dim**-0.5 if cfg.attention_scale is None else cfg.attention_scale
    exact = scale**-2
    return (
        values
        | write_windows(cfg)
        | {
            "query_pre_attn_scalar": round(exact) if round(exact) ** -0.5 == scale else exact,
            "attn_logit_softcapping": cfg.attention_softcap,
            "final_logit_softcapping": cfg.logit_softcap,
        }
    )


def _read_gemma3(f: Fields, names: Collection[str]) -> dict[str, Any]:
    number, period = f("num_hidden_layers"), f("sliding_window_pattern", None) or 6
    if f("_sliding_window_pattern", None) not in (None, period) and f.values.get("layer_types") is None:
        raise ValueError("config.json: _sliding_window_pattern would not be honoured; give layer_types")
    f.values.setdefault("attn_logit_softcapping", None)
    f.values.setdefault("final_logit_softcapping", None)
    by_kind = f.values.get("rope_parameters") is not None
    if not by_kind and f.values.get("rope_theta") is None:
        f.values["rope_theta"] = 1_000_000.0
    slides = [(i + 1) % period > 0 for i in range(number)]
    full = {"kind": "full_attention"} if by_kind else {}
    values = _read_gemma2(f, names, slides, full) | {"qk_norm": "head"}
    local = f("rope_local_base_freq", None)
    if by_kind:
        own = f.rope(values["max_length"], kind="sliding_attention")
        if own["rope_scaling"].kind != "none":
            raise ValueError("config.json: rope_parameters of sliding_attention are scaled, which is not supported")
        if local not in (None, own["rope_theta"]):
            raise ValueError(f"config.json: rope_local_base_freq={local} and rope_parameters differ")
        local = own["rope_theta"]
    return values | {"rope_local_theta": 10_000.0 if local is None else float(local)}


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
    return tensors(
        cfg,
        normed("attention_out_norm", "post_attention_layernorm")
        | normed("mlp_norm", "pre_feedforward_layernorm")
        | normed("mlp_out_norm", "post_feedforward_layernorm"),
    )


FAMILIES = (
    Family("gemma", "GemmaForCausalLM", _read_gemma, _write_gemma, tensors, **SHARED),
    Family("gemma2", "Gemma2ForCausalLM", _read_gemma2, _write_gemma2, _sandwich_tensors, **SHARED),
    Family("gemma3_text", "Gemma3ForCausalLM", _read_gemma3, _write_gemma3, _sandwich_tensors, **SHARED),
)
