"""Gemma 1, 2 and 3 (text): LLaMA's tensors, other norms, windows by turns."""

from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.hf.config_reader import ConfigReader
from jaxformer.hf.families.common import GATED
from jaxformer.hf.families.llama import ATTENTION_BIAS, read_windows, relative, tensors, write_windows
from jaxformer.hf.family import Field, Fields, Rule
from jaxformer.hf.layout import Table, normed
from jaxformer.hf.rope import ROPE, read_rope, write_rope

# Of several names for the tanh form the first is that of published files.
ACTIVATION = Field("hidden_activation", None, {"gelu_pytorch_tanh": "geglu_tanh", None: None} | GATED)
# "gelu" in the first files meant the tanh form all the same.
OLD_ACTIVATION = Field("hidden_act", None, ACTIVATION.choices | {"gelu": "geglu_tanh"})  # type: ignore[operator]


def _mlp(version: int) -> Rule:
    """The row of the feed-forward. Only Gemma 1 uses the older name of the activation."""

    def read(reader: ConfigReader) -> str:
        new, old = ACTIVATION.read(reader), OLD_ACTIVATION.read(reader)
        if old and old != (new or (old if version == 1 else "geglu_tanh")):
            names = f"hidden_act={reader('hidden_act')!r} and hidden_activation={reader('hidden_activation', None)!r}"
            raise ValueError(f"config.json: {names} differ")
        return new or old or "geglu_tanh"

    def write(cfg: ModelConfig) -> dict[str, Any]:
        values = ACTIVATION.write("mlp", cfg.mlp)
        return values | ({"hidden_act": values["hidden_activation"]} if version == 1 else {})

    return Rule(read, write)


def _fields(version: int) -> Fields:
    return ATTENTION_BIAS | {
        "head_dim": Field("head_dim", 256),
        "tied_head": Field("tie_word_embeddings", True),
        "norm": "rms_plus",
        "scale_embedding": True,
        "mlp": _mlp(version),
    }


# Gemma 2


def _read_gemma2_windows(reader: ConfigReader) -> Any:
    slides = [layer % 2 == 0 for layer in range(reader.integer("num_hidden_layers"))]
    return read_windows(reader, reader("sliding_window", 4096), slides)


def _write_scale(cfg: ModelConfig) -> dict[str, Any]:
    scale = cfg.head_dim**-0.5 if cfg.attention_scale is None else cfg.attention_scale
    exact = scale**-2
    return {"query_pre_attn_scalar": round(exact) if round(exact) ** -0.5 == scale else exact}


GEMMA2: Fields = _fields(version=2) | {
    "residual": "sandwich",
    "attention_scale": Rule(lambda reader: reader.number("query_pre_attn_scalar", 256) ** -0.5, _write_scale),
    "attention_softcap": Field("attn_logit_softcapping", 50.0),
    "logit_softcap": Field("final_logit_softcapping", 30.0),
    "window": Rule(_read_gemma2_windows, write_windows),
}


def _gemma2_tensors(cfg: ModelConfig) -> Table:
    return tensors(
        cfg,
        normed("attention_out_norm", "post_attention_layernorm")
        | normed("mlp_norm", "pre_feedforward_layernorm")
        | normed("mlp_out_norm", "post_feedforward_layernorm"),
    )


# Gemma 3


def _read_gemma3_windows(reader: ConfigReader) -> Any:
    period = reader("sliding_window_pattern", None) or 6
    if reader("_sliding_window_pattern", None) not in (None, period) and reader("layer_types", None) is None:
        raise ValueError("config.json: _sliding_window_pattern would not be honoured; give layer_types")
    slides = [(layer + 1) % period > 0 for layer in range(reader.integer("num_hidden_layers"))]
    return read_windows(reader, reader("sliding_window", 4096), slides)


def _read_gemma3_rope(reader: ConfigReader) -> tuple:
    by_kind = reader("rope_parameters", None) is not None
    return read_rope(reader, theta=1_000_000.0, kind="full_attention" if by_kind else None)


def _read_local_theta(reader: ConfigReader) -> float:
    local = reader("rope_local_base_freq", None)
    if reader("rope_parameters", None) is None:
        return 10_000.0 if local is None else float(local)
    theta, _, scaling = read_rope(reader, kind="sliding_attention")
    if scaling.kind != "none":
        raise ValueError("config.json: rope_parameters scale sliding_attention, which is not supported")
    if local not in (None, theta):
        raise ValueError(f"config.json: rope_local_base_freq={local} and rope_parameters differ")
    return theta


def _write_gemma3_rope(cfg: ModelConfig) -> dict[str, Any]:
    """Both spellings: versions before 5 read the older one, later ones ``rope_parameters``."""
    local = cfg.rope_theta if cfg.rope_local_theta is None else cfg.rope_local_theta
    older = write_rope(cfg)
    full = {"rope_type": "default"} | (older["rope_scaling"] or {}) | {"rope_theta": cfg.rope_theta}
    sliding = {"rope_type": "default", "rope_theta": local}
    kinds = {"full_attention": full, "sliding_attention": sliding}
    return older | {"rope_local_base_freq": local, "rope_parameters": kinds}


GEMMA3: Fields = GEMMA2 | {
    "qk_norm": "head",
    "attention_softcap": Field("attn_logit_softcapping", None),
    "logit_softcap": Field("final_logit_softcapping", None),
    "window": Rule(_read_gemma3_windows, write_windows),
    ROPE: Rule(_read_gemma3_rope, _write_gemma3_rope),
    "rope_local_theta": Rule(_read_local_theta),
}

ONLY = {"use_bidirectional_attention": False}
FAMILIES = {
    "gemma": relative("GemmaForCausalLM", _fields(version=1), only=ONLY),
    "gemma2": relative("Gemma2ForCausalLM", GEMMA2, only=ONLY, tensors=_gemma2_tensors),
    "gemma3_text": relative("Gemma3ForCausalLM", GEMMA3, only=ONLY, tensors=_gemma2_tensors),
}
