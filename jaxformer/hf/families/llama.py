"""LLaMA and its relatives: Mistral, Qwen2, Qwen3, OLMo-2, Phi-3, StableLM."""

import dataclasses
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.hf.config_reader import ConfigReader
from jaxformer.hf.families.common import GATED, SIZES
from jaxformer.hf.family import Family, Field, Fields, Rule
from jaxformer.hf.layout import Source, Table, attention, gated, joined, layers, normed
from jaxformer.hf.rope import ROPE, read_rope, rope, write_rope

BASE: Fields = SIZES | {
    "n_kv_heads": Field("num_key_value_heads", None),
    "head_dim": Field("head_dim", None),
    "norm": "rms",
    "norm_eps": Field("rms_norm_eps"),
    "mlp": Field("hidden_act", "silu", GATED),
    "tied_head": Field("tie_word_embeddings", False),
    "execution.attention_dropout": Field("attention_dropout", 0.0),
    "position": "rope",
    "rope_layout": "half",
    ROPE: rope(),
}
"""The rows that LLaMA and its relatives share."""
ATTENTION_BIAS: Fields = dict.fromkeys(("qkv_bias", "out_bias"), Field("attention_bias", False))


def tensors(cfg: ModelConfig, block: Table | None = None) -> Table:
    """LLaMA's tensors; ``block`` replaces or adds some of a layer's."""
    all_heads = cfg.qk_norm != "head"
    layer = (
        attention("attention", "self_attn")
        | normed("attention.query_norm", "self_attn.q_norm", "(KGH)" if all_heads else "H")
        | normed("attention.key_norm", "self_attn.k_norm", "(KH)" if all_heads else "H")
        | normed("attention_norm", "input_layernorm")
        | gated("mlp", "mlp")
        | normed("mlp_norm", "post_attention_layernorm")
    )
    return {
        "embedding.token": Source("model.embed_tokens.weight", "VD"),
        **layers("decoder", "model.layers", layer | (block or {})),
        **normed("decoder.norm", "model.norm"),
        "head.kernel": Source("lm_head.weight", "VD"),
    }


LLAMA = Family(
    "LlamaForCausalLM",
    BASE | ATTENTION_BIAS | {"mlp_bias": Field("mlp_bias", False)},
    tensors,
    only={
        "pretraining_tp": 1,
        "is_decoder": False,
        "add_cross_attention": False,
        "is_encoder_decoder": False,
        "pruned_heads": {},
    },
    prefix="model.",
    copies={"lm_head.weight": "embedding.token"},
    buffers=(r".*rotary_emb\.inv_freq",),
)


def relative(architecture: str, fields: Fields, *, only: dict[str, Any] | None = None, **changes: Any) -> Family:
    """A family like LLaMA. fields: rows that replace some of ``BASE``. only: added to LLaMA's. changes: other attributes."""
    return dataclasses.replace(
        LLAMA, architecture=architecture, fields=BASE | fields, only=LLAMA.only | (only or {}), **changes
    )


# Windows


def window_of(cfg: ModelConfig) -> int | None:
    """The one width of the layers that have a window; None where no layer has. Raises ValueError for several widths."""
    widths = {layer.window for layer in cfg.layers if isinstance(layer.window, int)}
    if len(widths) > 1:
        raise ValueError(f"this family has one window width, but the config has {sorted(widths)}")
    return widths.pop() if widths else None


def window(default: int | None = None) -> Rule:
    """The row of families all of whose layers have one window."""
    return Rule(lambda reader: reader("sliding_window", default), lambda cfg: {"sliding_window": window_of(cfg)})


def read_windows(reader: ConfigReader, width: int | None, slides: list[bool]) -> int | tuple[int | None, ...] | None:
    """The windows of layers: by ``layer_types`` where that is given, else by ``slides``."""
    types, n_layers = reader("layer_types", None), reader.integer("num_hidden_layers")
    if types is not None:
        kinds = {"sliding_attention": True, "full_attention": False}
        if not isinstance(types, list) or len(types) != n_layers or any(kind not in kinds for kind in types):
            raise ValueError(
                f"config.json: layer_types={types!r} must name full_attention or sliding_attention for {n_layers} layers"
            )
        slides = [kinds[kind] for kind in types]
    if any(slides) and width is None:
        raise ValueError("config.json: layer_types has sliding_attention, but there is no sliding_window")
    windows = tuple(width if slide else None for slide in slides)
    return windows[0] if len(set(windows)) == 1 else windows


def write_windows(cfg: ModelConfig) -> dict[str, Any]:
    """``sliding_window`` and ``layer_types``, back from ``read_windows``."""
    types = ["full_attention" if layer.window is None else "sliding_attention" for layer in cfg.layers]
    return {"sliding_window": window_of(cfg), "layer_types": types}


# Qwen


def _read_qwen_windows(reader: ConfigReader) -> int | tuple[int | None, ...] | None:
    n_layers, first = reader.integer("num_hidden_layers"), reader.integer("max_window_layers", 28)
    width = reader("sliding_window", 4096)
    if not reader.boolean("use_sliding_window", False):
        return read_windows(reader, None, [False] * n_layers)
    return read_windows(reader, width, [layer >= first for layer in range(n_layers)])


def _write_qwen_windows(cfg: ModelConfig) -> dict[str, Any]:
    windows = write_windows(cfg)
    first = windows["layer_types"].count("full_attention")
    if "sliding_attention" in windows["layer_types"][:first]:
        raise ValueError("this family has windows from one layer on, not in alternating layers")
    return windows | {"use_sliding_window": first < cfg.n_layers, "max_window_layers": first}


QWEN_WINDOW = Rule(_read_qwen_windows, _write_qwen_windows)
QWEN3: Fields = ATTENTION_BIAS | {"qk_norm": "head"}


# OLMo-2, Phi-3, StableLM


def _olmo2_tensors(cfg: ModelConfig) -> Table:
    norms = normed("attention_norm", "post_attention_layernorm") | normed("mlp_norm", "post_feedforward_layernorm")
    return tensors(cfg, norms)


def _read_phi3_rope(reader: ConfigReader) -> tuple:
    values = read_rope(reader, share="partial_rotary_factor")
    if values[-1].kind != "none":
        raise ValueError(f"config.json: rope type {values[-1].kind!r} is not one of this family's")
    return values


def _write_phi3_rope(cfg: ModelConfig) -> dict[str, Any]:
    return write_rope(cfg, share="partial_rotary_factor") | {"original_max_position_embeddings": cfg.max_length}


def _phi3_tensors(cfg: ModelConfig) -> Table:
    projections = joined(("attention.query", "attention.key", "attention.value"), "self_attn.qkv_proj.weight", "[KGH|KH|KH]D")
    return tensors(cfg, projections | joined(("mlp.gate", "mlp.up"), "mlp.gate_up_proj.weight", "[F|F]D"))


def _stablelm_tensors(cfg: ModelConfig) -> Table:
    # In its parallel form one norm serves both branches.
    return tensors(cfg, normed("mlp_norm", "input_layernorm") if cfg.residual == "parallel" else {})


FAMILIES = {
    "llama": LLAMA,
    "mistral": relative("MistralForCausalLM", {"window": window(4096)}, only={"attention_bias": False}),
    "qwen2": relative("Qwen2ForCausalLM", {"qkv_bias": True, "window": QWEN_WINDOW}, only={"use_mrope": False}),
    "qwen3": relative(
        "Qwen3ForCausalLM", QWEN3 | {"head_dim": Field("head_dim", 128), "window": QWEN_WINDOW}, only={"use_mrope": False}
    ),
    "olmo2": relative("Olmo2ForCausalLM", ATTENTION_BIAS | {"qk_norm": "all", "residual": "branch"}, tensors=_olmo2_tensors),
    "phi3": relative(
        "Phi3ForCausalLM",
        {
            "window": window(),
            "execution.residual_dropout": Field("resid_pdrop", 0.0),
            "execution.embedding_dropout": Field("embd_pdrop", 0.0),
            ROPE: Rule(_read_phi3_rope, _write_phi3_rope),
        },
        only={"attention_bias": False},
        ignored=("original_max_position_embeddings",),
        tensors=_phi3_tensors,
    ),
    "stablelm": relative(
        "StableLmForCausalLM",
        {
            "norm": "layer",
            "norm_eps": Field("layer_norm_eps"),
            "qkv_bias": Field("use_qkv_bias", False),
            "residual": Field("use_parallel_residual", False, {True: "parallel", False: "pre", None: "pre"}),
            "execution.residual_dropout": Field("hidden_dropout", 0.0),
            ROPE: rope(share="partial_rotary_factor", fraction=0.25),
        },
        only={"qk_layernorm": False},
        tensors=_stablelm_tensors,
    ),
}
