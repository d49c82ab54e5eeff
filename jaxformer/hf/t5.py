"""T5, versions 1.0 and 1.1."""

from collections.abc import Collection
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.hf.fields import Fields
from jaxformer.hf.layout import Source
from jaxformer.hf.tables import SHARED_TABLE, Family, Table, attention, inverse, layers, linear, normed

T5_MLP = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gated-gelu": "geglu_tanh", "gated-silu": "swiglu"}
T5_MLP |= {"gated-gelu_new": "geglu_tanh"}


def _read_t5(f: Fields, names: Collection[str]) -> dict[str, Any]:
    f.only(is_encoder_decoder=True, is_decoder=False)
    mlp = f.choice("feed_forward_proj", T5_MLP, "relu")
    projection = f("feed_forward_proj", "relu")
    activation = {"gated-gelu": "gelu_new"}.get(projection, projection.removeprefix("gated-"))
    f.only(dense_act_fn=activation, is_gated_act=projection.startswith("gated-"))  # they would go before it
    f("initializer_factor", None)
    tied = f("tie_word_embeddings", True)
    # Version 5 writes tie_word_embeddings=true for all, and says by this field whether the head is the embedding.
    scaled = f("scale_decoder_outputs", tied)
    dropout = f("dropout_rate", 0.1)
    number = f("num_layers")
    return {
        "vocab_size": f("vocab_size"),
        "d_model": f("d_model"),
        "n_layers": f("num_decoder_layers", None) or number,
        "encoder_layers": number,
        "n_heads": f("num_heads"),
        "head_dim": f("d_kv"),
        "d_ff": f("d_ff"),
        "max_length": f("n_positions", 512),
        "start_token": f("decoder_start_token_id", 0),
        "norm": "rms",
        "norm_eps": f("layer_norm_epsilon", 1e-6),
        "mlp": mlp,
        "residual": "pre",
        "position": "relative",
        "relative_buckets": f("relative_attention_num_buckets", 32),
        "relative_distance": f("relative_attention_max_distance", 128),
        "attention_scale": 1.0,
        "tied_head": tied and (scaled or "lm_head.weight" not in names),
        "scale_head": bool(scaled),
        "attention_dropout": dropout,
        "residual_dropout": dropout,
        "embedding_dropout": dropout,
    }


def _write_t5(cfg: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": cfg.vocab_size,
        "d_model": cfg.d_model,
        "d_kv": cfg.head_dim,
        "d_ff": cfg.d_ff,
        "num_layers": cfg.encoder_layers,
        "num_decoder_layers": cfg.n_layers,
        "num_heads": cfg.n_heads,
        "n_positions": cfg.max_length,
        "decoder_start_token_id": cfg.start_token,
        "layer_norm_epsilon": cfg.norm_eps,
        "feed_forward_proj": inverse(T5_MLP, cfg.mlp),
        "relative_attention_num_buckets": cfg.relative_buckets,
        "relative_attention_max_distance": cfg.relative_distance,
        "tie_word_embeddings": cfg.tied_head,
        "scale_decoder_outputs": cfg.scale_head,
        "dropout_rate": cfg.execution.residual_dropout,
        "is_encoder_decoder": True,
        "pad_token_id": cfg.start_token,
    }


def _t5_tensors(cfg: ModelConfig) -> Table:
    wide = {"gate": "wi_0", "up": "wi_1"} if cfg.mlp in ("swiglu", "geglu", "geglu_tanh") else {"up": "wi"}
    table: Table = {"embedding.token": Source("shared.weight", "VD"), "head.kernel": Source("lm_head.weight", "VD")}
    for stack, last in (("encoder", 1), ("decoder", 2)):
        feed = f"layer.{last}.DenseReluDense"
        block: Table = {
            **attention("attention", "layer.0.SelfAttention", "q", "k", "v", "o"),
            **normed("attention_norm", "layer.0.layer_norm"),
            **attention("cross_attention", "layer.1.EncDecAttention", "q", "k", "v", "o"),
            **normed("cross_attention_norm", "layer.1.layer_norm"),
            **linear("mlp.down", f"{feed}.wo", "D", "F"),
            **normed("mlp_norm", f"layer.{last}.layer_norm"),
        }
        for part, name in wide.items():
            block |= linear(f"mlp.{part}", f"{feed}.{name}", "F", "D")
        table |= layers(stack, f"{stack}.block", block) | normed(f"{stack}.norm", f"{stack}.final_layer_norm")
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        table[f"{stack}.position.table"] = Source(bias, "P(KG)")
    return table


FAMILIES = (
    Family(
        "t5",
        "T5ForConditionalGeneration",
        _read_t5,
        _write_t5,
        _t5_tensors,
        same=SHARED_TABLE | {"lm_head.weight": "embedding.token"},
        buffers=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    ),
)
