"""The few published models that decoding is tested with, mapped onto ours by hand: config, and parameters stacked by layer."""

from typing import Any

import numpy as np

import jaxformer as jf

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


def model(hf: dict[str, Any], tensors: dict[str, np.ndarray]) -> tuple[jf.ModelConfig, dict]:
    """Our config and parameters."""
    cfg, params = FAMILIES[hf["model_type"]](hf, tensors)
    return cfg, params


def _stacked(layers: list[dict]) -> dict:
    if not isinstance(layers[0], dict):
        return np.stack(layers)
    return {name: _stacked([layer[name] for layer in layers]) for name in layers[0]}


def _norm(t, name):
    parts = {"gain": t[f"{name}.weight"]}
    return parts | ({"bias": t[f"{name}.bias"]} if f"{name}.bias" in t else {})


def _attention(t, cfg: jf.ModelConfig, names: dict[str, str]) -> dict:
    """From (out, in) projections q, k, v and o."""
    s = cfg.sizes
    shapes = {"query": (-1, s["K"], s["G"], s["H"]), "key": (-1, s["K"], s["H"]), "value": (-1, s["K"], s["H"])}
    parts = {part: t[f"{names[part]}.weight"].T.reshape(shape) for part, shape in shapes.items()}
    parts["out"] = t[f"{names['out']}.weight"].T.reshape(s["K"], s["G"], s["H"], -1)
    for part, shape in shapes.items():
        if f"{names[part]}.bias" in t:
            parts[f"{part}_bias"] = t[f"{names[part]}.bias"].reshape(shape[1:])
    return parts | ({"out_bias": t[f"{names['out']}.bias"]} if f"{names['out']}.bias" in t else {})


def _gpt2(hf, t):
    d, n = hf["n_embd"], hf["n_head"]
    cfg = jf.presets.gpt2(
        vocab_size=hf["vocab_size"],
        d_model=d,
        n_heads=n,
        n_layers=hf["n_layer"],
        d_ff=hf["n_inner"] or 4 * d,
        max_length=hf["n_positions"],
        norm_eps=hf["layer_norm_epsilon"],
        mlp=ACTIVATIONS[hf["activation_function"]],
    )
    t = {name.removeprefix("transformer."): value for name, value in t.items()}

    def layer(i):
        at = f"h.{i}."
        split = {}  # c_attn holds q, k and v side by side, as (in, out)
        for part, kernel, bias in zip(
            "qkv", np.split(t[at + "attn.c_attn.weight"], 3, 1), np.split(t[at + "attn.c_attn.bias"], 3), strict=True
        ):
            split |= {f"{part}.weight": kernel.T, f"{part}.bias": bias}
        split |= {"o.weight": t[at + "attn.c_proj.weight"].T, "o.bias": t[at + "attn.c_proj.bias"]}
        return {
            "attention": _attention(split, cfg, {"query": "q", "key": "k", "value": "v", "out": "o"}),
            "attention_norm": _norm(t, at + "ln_1"),
            "mlp": {
                "up": t[at + "mlp.c_fc.weight"],
                "up_bias": t[at + "mlp.c_fc.bias"],
                "down": t[at + "mlp.c_proj.weight"],
                "down_bias": t[at + "mlp.c_proj.bias"],
            },
            "mlp_norm": _norm(t, at + "ln_2"),
        }

    decoder = {
        "layers": _stacked([layer(i) for i in range(cfg.n_layers)]),
        "norm": _norm(t, "ln_f"),
        "position": {"table": t["wpe.weight"]},
    }
    return cfg, {"embedding": {"token": t["wte.weight"]}, "decoder": decoder}


def _scaling(rope: dict) -> jf.RopeScaling:
    if rope["rope_type"] == "default":
        return jf.RopeScaling()
    names = {"original_max_position_embeddings": "original_length", "low_freq_factor": "low_frequency"}
    names |= {"high_freq_factor": "high_frequency", "rope_type": "kind"}
    return jf.RopeScaling(**{names.get(name, name): value for name, value in rope.items() if name != "rope_theta"})


def _llama(hf, t):
    rope = dict(hf["rope_parameters"])
    if rope["rope_type"] == "dynamic":
        rope.setdefault("original_max_position_embeddings", hf["max_position_embeddings"])
    window = hf.get("sliding_window") if hf["model_type"] == "mistral" or hf.get("use_sliding_window") else None
    if window and "max_window_layers" in hf:
        window = tuple(window if i >= hf["max_window_layers"] else None for i in range(hf["num_hidden_layers"]))
    cfg = jf.presets.llama(
        vocab_size=hf["vocab_size"],
        d_model=hf["hidden_size"],
        n_heads=hf["num_attention_heads"],
        n_kv_heads=hf["num_key_value_heads"],
        head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        n_layers=hf["num_hidden_layers"],
        d_ff=hf["intermediate_size"],
        max_length=hf["max_position_embeddings"],
        norm_eps=hf["rms_norm_eps"],
        rope_theta=rope["rope_theta"],
        rope_scaling=_scaling(rope),
        rope_layout="half",
        window=window,
        qkv_bias=hf["model_type"] == "qwen2",
        qk_norm=hf["model_type"] == "qwen3",
        tied_head=hf["tie_word_embeddings"],
    )

    def layer(i):
        at = f"model.layers.{i}."
        names = {part: f"{at}self_attn.{p}_proj" for part, p in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o"))}
        attention = _attention(t, cfg, names)
        if cfg.qk_norm != "none":
            attention |= {f"{part}_norm": _norm(t, f"{at}self_attn.{part[0]}_norm") for part in ("query", "key")}
        return {
            "attention": attention,
            "attention_norm": _norm(t, at + "input_layernorm"),
            "mlp": {part: t[f"{at}mlp.{part}_proj.weight"].T for part in ("gate", "up", "down")},
            "mlp_norm": _norm(t, at + "post_attention_layernorm"),
        }

    decoder = {"layers": _stacked([layer(i) for i in range(cfg.n_layers)]), "norm": _norm(t, "model.norm")}
    params = {"embedding": {"token": t["model.embed_tokens.weight"]}, "decoder": decoder}
    return cfg, params if cfg.tied_head else params | {"head": {"kernel": t["lm_head.weight"].T}}


def _bart(hf, t):
    marian = hf["model_type"] == "marian"
    cfg = jf.presets.transformer_base(
        vocab_size=hf["vocab_size"],
        d_model=hf["d_model"],
        n_heads=hf["decoder_attention_heads"],
        encoder_heads=hf["encoder_attention_heads"],
        n_layers=hf["decoder_layers"],
        encoder_layers=hf["encoder_layers"],
        d_ff=hf["decoder_ffn_dim"],
        encoder_d_ff=hf["encoder_ffn_dim"],
        max_length=hf["max_position_embeddings"],
        mlp=ACTIVATIONS[hf["activation_function"]],
        qkv_bias=True,
        out_bias=True,
        head_bias=True,
        position="sinusoidal_half" if marian else "learned",
        embedding_norm=not marian,
        scale_embedding=hf["scale_embedding"],
        start_token=hf["decoder_start_token_id"],
    )

    def layer(at, own, cross):
        def attention(name):
            names = {part: f"{at}{name}.{p}_proj" for part, p in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "out"))}
            return _attention(t, own, names)

        parts = {
            "attention": attention("self_attn"),
            "attention_norm": _norm(t, at + "self_attn_layer_norm"),
            "mlp": {
                "up": t[at + "fc1.weight"].T,
                "up_bias": t[at + "fc1.bias"],
                "down": t[at + "fc2.weight"].T,
                "down_bias": t[at + "fc2.bias"],
            },
            "mlp_norm": _norm(t, at + "final_layer_norm"),
        }
        if cross:
            parts |= {
                "cross_attention": attention("encoder_attn"),
                "cross_attention_norm": _norm(t, at + "encoder_attn_layer_norm"),
            }
        return parts

    params: dict[str, Any] = {"embedding": {"token": t["model.shared.weight"]}}
    for name, own in (("encoder", cfg.encoder), ("decoder", cfg)):
        layers = [layer(f"model.{name}.layers.{i}.", own, name == "decoder") for i in range(own.n_layers)]
        params[name] = {"layers": _stacked(layers)}
        if not marian:  # BART's table begins with two rows that no position reads
            params[name]["position"] = {"table": t[f"model.{name}.embed_positions.weight"][2:]}
            params[name]["embedding_norm"] = _norm(t, f"model.{name}.layernorm_embedding")
    return cfg, params | {"head": {"bias": t["final_logits_bias"].reshape(-1)}}


def _t5(hf, t):
    gated = hf["is_gated_act"]
    cfg = jf.presets.transformer_base(
        vocab_size=hf["vocab_size"],
        d_model=hf["d_model"],
        n_heads=hf["num_heads"],
        head_dim=hf["d_kv"],
        n_layers=hf["num_decoder_layers"],
        encoder_layers=hf["num_layers"],
        d_ff=hf["d_ff"],
        mlp="geglu_tanh" if gated else "relu",
        mlp_bias=False,
        norm="rms",
        norm_eps=hf["layer_norm_epsilon"],
        residual="pre",
        position="relative",
        relative_buckets=hf["relative_attention_num_buckets"],
        relative_distance=hf["relative_attention_max_distance"],
        attention_scale=1.0,
        scale_embedding=False,
        tied_head=hf["tie_word_embeddings"],
        scale_head=hf["scale_decoder_outputs"],
        start_token=hf["decoder_start_token_id"],
    )

    def layer(at, cross):
        def attention(name):
            names = {part: f"{at}{name}.{p}" for part, p in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o"))}
            return _attention(t, cfg, names)

        last = f"{at}layer.{2 if cross else 1}."
        wide = {"gate": "wi_0", "up": "wi_1", "down": "wo"} if gated else {"up": "wi", "down": "wo"}
        parts = {
            "attention": attention("layer.0.SelfAttention"),
            "attention_norm": _norm(t, at + "layer.0.layer_norm"),
            "mlp": {part: t[f"{last}DenseReluDense.{name}.weight"].T for part, name in wide.items()},
            "mlp_norm": _norm(t, last + "layer_norm"),
        }
        if cross:
            parts |= {
                "cross_attention": attention("layer.1.EncDecAttention"),
                "cross_attention_norm": _norm(t, at + "layer.1.layer_norm"),
            }
        return parts

    params: dict[str, Any] = {"embedding": {"token": t["shared.weight"]}}
    for name, number in (("encoder", cfg.encoder_layers), ("decoder", cfg.n_layers)):
        table = t[f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        params[name] = {
            "layers": _stacked([layer(f"{name}.block.{i}.", name == "decoder") for i in range(number)]),
            "norm": _norm(t, f"{name}.final_layer_norm"),
            "position": {"table": table.reshape(-1, cfg.n_kv_heads, 1)},
        }
    return cfg, params if cfg.tied_head else params | {"head": {"kernel": t["lm_head.weight"].T}}


FAMILIES = {"gpt2": _gpt2, "marian": _bart, "bart": _bart, "t5": _t5} | dict.fromkeys(
    ("llama", "mistral", "qwen2", "qwen3"), _llama
)
