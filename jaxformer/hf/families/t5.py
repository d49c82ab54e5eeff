"""T5, versions 1.0 and 1.1."""

from jaxformer.config import ModelConfig
from jaxformer.hf.config_reader import ConfigReader
from jaxformer.hf.families.common import SHARED_EMBEDDING
from jaxformer.hf.family import Family, Field, Rule
from jaxformer.hf.layout import Source, Table, attention, gated, layers, linear, normed

GATED = {"gated-gelu": "geglu_tanh", "gated-silu": "swiglu", "gated-gelu_new": "geglu_tanh"}
PROJECTION = Field("feed_forward_proj", "relu", {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh"} | GATED)


def _read_mlp(reader: ConfigReader) -> str:
    mlp, projection = PROJECTION.read(reader), reader("feed_forward_proj", "relu")
    activation = {"gated-gelu": "gelu_new"}.get(projection, projection.removeprefix("gated-"))
    reader.only("dense_act_fn", activation)  # these two would go before it
    reader.only("is_gated_act", projection.startswith("gated-"))
    return mlp


# transformers 5 writes tie_word_embeddings=true for all, and says by scale_decoder_outputs whether the head is the embedding.


def _read_scaled(reader: ConfigReader) -> bool:
    return reader.boolean("scale_decoder_outputs", reader.boolean("tie_word_embeddings", True))


def _read_tied(reader: ConfigReader) -> bool:
    return reader.boolean("tie_word_embeddings", True) and (_read_scaled(reader) or "lm_head.weight" not in reader.tensors)


def _tensors(cfg: ModelConfig) -> Table:
    table: Table = {"embedding.token": Source("shared.weight", "VD"), "head.kernel": Source("lm_head.weight", "VD")}
    for stack, last in (("encoder", 1), ("decoder", 2)):
        mlp = f"layer.{last}.DenseReluDense"
        if cfg.mlp in ("swiglu", "geglu", "geglu_tanh"):
            block = gated("mlp", mlp, "wi_0", "wi_1", "wo")
        else:
            block = linear("mlp.up", f"{mlp}.wi", "F", "D") | linear("mlp.down", f"{mlp}.wo", "D", "F")
        block |= attention("attention", "layer.0.SelfAttention", "q", "k", "v", "o")
        block |= normed("attention_norm", "layer.0.layer_norm")
        block |= attention("cross_attention", "layer.1.EncDecAttention", "q", "k", "v", "o")
        block |= normed("cross_attention_norm", "layer.1.layer_norm")
        block |= normed("mlp_norm", f"layer.{last}.layer_norm")
        table |= layers(stack, f"{stack}.block", block) | normed(f"{stack}.norm", f"{stack}.final_layer_norm")
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        table[f"{stack}.position.table"] = Source(bias, "P(KG)")
    return table


FAMILIES = {
    "t5": Family(
        "T5ForConditionalGeneration",
        {
            "vocab_size": Field("vocab_size"),
            "d_model": Field("d_model"),
            "n_layers": Rule(
                lambda reader: reader("num_decoder_layers", None) or reader("num_layers"),
                lambda cfg: {"num_decoder_layers": cfg.n_layers},
            ),
            "encoder_layers": Field("num_layers"),
            "n_heads": Field("num_heads"),
            "head_dim": Field("d_kv"),
            "d_ff": Field("d_ff"),
            "max_length": Field("n_positions", 512),
            "start_token": Rule(
                lambda reader: reader("decoder_start_token_id", 0),
                lambda cfg: {"decoder_start_token_id": cfg.start_token, "pad_token_id": cfg.start_token},
            ),
            "norm": "rms",
            "norm_eps": Field("layer_norm_epsilon", 1e-6),
            "mlp": Rule(_read_mlp, lambda cfg: PROJECTION.write("mlp", cfg.mlp)),
            "residual": "pre",
            "position": "relative",
            "relative_buckets": Field("relative_attention_num_buckets", 32),
            "relative_distance": Field("relative_attention_max_distance", 128),
            "attention_scale": 1.0,
            "tied_head": Rule(_read_tied, lambda cfg: {"tie_word_embeddings": cfg.tied_head}),
            "scale_head": Rule(_read_scaled, lambda cfg: {"scale_decoder_outputs": cfg.scale_head}),
            "execution.residual_dropout": Field("dropout_rate", 0.1),
            "execution.attention_dropout": Field("dropout_rate", 0.1),
            "execution.embedding_dropout": Field("dropout_rate", 0.1),
        },
        _tensors,
        only={"is_encoder_decoder": True, "is_decoder": False},
        written={"is_encoder_decoder": True},
        copies=SHARED_EMBEDDING | {"lm_head.weight": "embedding.token"},
        buffers=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    ),
}
