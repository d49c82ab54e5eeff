"""Two encoder–decoders: Marian (the published form of the 2017 model), and BART."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.hf.config_reader import ConfigReader
from jaxformer.hf.families.common import PLAIN, SHARED_EMBEDDING
from jaxformer.hf.family import Family, Field, Fields, Rule
from jaxformer.hf.layout import Source, Table, attention, layers, linear, normed
from jaxformer.nn import position


def _of_encoder(ours: str, decoder_ours: str, name: str, decoder_name: str) -> Rule:
    """A size of the encoder, None where it is the decoder's."""

    def read(reader: ConfigReader) -> Any:
        return None if reader(name) == reader(decoder_name) else reader(name)

    return Rule(read, lambda cfg: {name: getattr(cfg, ours) or getattr(cfg, decoder_ours)})


FIELDS: Fields = {
    "vocab_size": Field("vocab_size"),
    "d_model": Field("d_model"),
    "n_layers": Field("decoder_layers"),
    "encoder_layers": Field("encoder_layers"),
    "n_heads": Field("decoder_attention_heads"),
    "encoder_heads": _of_encoder("encoder_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads"),
    "d_ff": Field("decoder_ffn_dim"),
    "encoder_d_ff": _of_encoder("encoder_d_ff", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"),
    "max_length": Field("max_position_embeddings"),
    "start_token": Field("decoder_start_token_id"),
    "norm": "layer",
    "mlp": Field("activation_function", "gelu", PLAIN),
    "residual": "post",
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "tied_head": Field("tie_word_embeddings", True),
    "head_bias": Rule(lambda reader: "final_logits_bias" in reader.tensors),  # files of the bare model have none
    "scale_embedding": Field("scale_embedding", False),
    "execution.attention_dropout": Field("attention_dropout", 0.0),
    "execution.residual_dropout": Field("dropout", 0.1),
    "execution.embedding_dropout": Field("dropout", 0.1),
}


def _tensors(cfg: ModelConfig) -> Table:
    table: Table = {
        "embedding.token": Source("model.shared.weight", "VD"),
        "head.kernel": Source("lm_head.weight", "VD"),
        "head.bias": Source("final_logits_bias", "1V"),
    }
    block = (
        attention("attention", "self_attn", o="out_proj")
        | normed("attention_norm", "self_attn_layer_norm")
        | attention("cross_attention", "encoder_attn", o="out_proj")
        | normed("cross_attention_norm", "encoder_attn_layer_norm")
        | linear("mlp.up", "fc1", "F", "D")
        | linear("mlp.down", "fc2", "D", "F")
        | normed("mlp_norm", "final_layer_norm")
    )
    for stack in ("encoder", "decoder"):
        table |= layers(stack, f"model.{stack}.layers", block)
        table |= normed(f"{stack}.embedding_norm", f"model.{stack}.layernorm_embedding")
        table[f"{stack}.position.table"] = Source(f"model.{stack}.embed_positions.weight", "PD")
    return table


BART = Family(
    "BartForConditionalGeneration",
    FIELDS | {"position": "learned", "position_offset": 2, "embedding_norm": True},
    _tensors,
    only={
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "decoder_vocab_size": Field("vocab_size"),
        "is_decoder": False,
        "is_encoder_decoder": True,
        "normalize_before": False,
        "normalize_embedding": True,
        "num_hidden_layers": Field("encoder_layers"),
        "share_encoder_decoder_embeddings": True,
        "static_position_embeddings": False,
    },
    ignored=("force_bos_token_to_be_generated", "extra_pos_embeddings"),
    not_applied=("activation_dropout", "encoder_layerdrop", "decoder_layerdrop"),
    written={"is_encoder_decoder": True, "forced_eos_token_id": None},  # 2 where it is not said
    prefix="model.",
    copies={f"model.{name}": path for name, path in SHARED_EMBEDDING.items()} | {"lm_head.weight": "embedding.token"},
)
MARIAN = dataclasses.replace(
    BART,
    architecture="MarianMTModel",
    fields=FIELDS | {"position": "sinusoidal_half"},
    only=BART.only | {"normalize_embedding": False, "static_position_embeddings": True},
    buffers=(r"model\.(en|de)coder\.embed_positions\.weight",),
    constant=lambda cfg: np.asarray(position.half_sinusoids(jnp.arange(cfg.max_length), cfg.d_model)),
)
FAMILIES = {"marian": MARIAN, "bart": BART}
