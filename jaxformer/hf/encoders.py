"""BERT, and two encoder–decoders: Marian (the published form of the 2017 model), and BART."""

from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.hf.fields import Fields
from jaxformer.hf.layout import Source
from jaxformer.hf.tables import (
    PLAIN,
    SHARED_TABLE,
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
from jaxformer.nn import position

# BERT


def _read_bert(f: Fields, names: Collection[str]) -> dict[str, Any]:
    f.only(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    f("pooler_fc_size", None)
    for name in ("pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type", "directionality"):
        f(name, None)
    head = any(name.startswith("cls.predictions.") for name in names)
    dropout = f("hidden_dropout_prob", 0.1)
    return sized(
        f,
        norm="layer",
        norm_eps=f("layer_norm_eps", 1e-12),
        mlp=f.choice("hidden_act", PLAIN, "gelu"),
        residual="post",
        position="learned",
        causal=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        embedding_norm=True,
        token_types=f("type_vocab_size", 2),
        has_head=head,
        head_transform=head,
        head_bias=head,
        tied_head=f("tie_word_embeddings", True),
        pooler=any(name.removeprefix("bert.").startswith("pooler.") for name in names),
        attention_dropout=f("attention_probs_dropout_prob", 0.1),
        residual_dropout=dropout,
        embedding_dropout=dropout,
    )


def _write_bert(cfg: ModelConfig) -> dict[str, Any]:
    return write_sized(cfg) | {
        "layer_norm_eps": cfg.norm_eps,
        "hidden_act": inverse(PLAIN, cfg.mlp),
        "type_vocab_size": cfg.token_types,
        "tie_word_embeddings": cfg.tied_head,
        "attention_probs_dropout_prob": cfg.execution.attention_dropout,
        "hidden_dropout_prob": cfg.execution.residual_dropout,
    }


def _bert_tensors(cfg: ModelConfig) -> Table:
    block: Table = {
        **attention("attention", "attention", "self.query", "self.key", "self.value", "output.dense"),
        **normed("attention_norm", "attention.output.LayerNorm"),
        **linear("mlp.up", "intermediate.dense", "F", "D"),
        **linear("mlp.down", "output.dense", "D", "F"),
        **normed("mlp_norm", "output.LayerNorm"),
    }
    return {
        "embedding.token": Source("bert.embeddings.word_embeddings.weight", "VD"),
        "embedding.type": Source("bert.embeddings.token_type_embeddings.weight", "PD"),
        "decoder.position.table": Source("bert.embeddings.position_embeddings.weight", "PD"),
        **normed("decoder.embedding_norm", "bert.embeddings.LayerNorm"),
        **layers("decoder", "bert.encoder.layer", block),
        "pooler.kernel": Source("bert.pooler.dense.weight", "FD"),
        "pooler.bias": Source("bert.pooler.dense.bias", "F"),
        "head.transform.kernel": Source("cls.predictions.transform.dense.weight", "FD"),
        "head.transform.bias": Source("cls.predictions.transform.dense.bias", "F"),
        **normed("head.transform.norm", "cls.predictions.transform.LayerNorm"),
        "head.kernel": Source("cls.predictions.decoder.weight", "VD"),
        "head.bias": Source("cls.predictions.bias", "V"),
    }


# Marian and BART


def _read_bart(f: Fields, names: Collection[str]) -> dict[str, Any]:
    f.training("activation_dropout", "encoder_layerdrop", "decoder_layerdrop")
    f.only(add_bias_logits=False, num_hidden_layers=f("encoder_layers"))
    f.only(add_final_layer_norm=False, normalize_before=False, is_decoder=False, is_encoder_decoder=True)
    f.only(share_encoder_decoder_embeddings=True, decoder_vocab_size=f("vocab_size"))
    for name in ("gradient_checkpointing", "force_bos_token_to_be_generated", "extra_pos_embeddings"):
        f(name, None)
    dropout, heads, width = f("dropout", 0.1), f("decoder_attention_heads"), f("decoder_ffn_dim")
    own_heads, own_width = f("encoder_attention_heads"), f("encoder_ffn_dim")
    return {
        "vocab_size": f("vocab_size"),
        "d_model": f("d_model"),
        "n_layers": f("decoder_layers"),
        "encoder_layers": f("encoder_layers"),
        "n_heads": heads,
        "encoder_heads": None if own_heads == heads else own_heads,
        "d_ff": width,
        "encoder_d_ff": None if own_width == width else own_width,
        "max_length": f("max_position_embeddings"),
        "start_token": f("decoder_start_token_id"),
        "norm": "layer",
        "mlp": f.choice("activation_function", PLAIN, "gelu"),
        "residual": "post",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "tied_head": f("tie_word_embeddings", True),
        "head_bias": "final_logits_bias" in names,  # files of the bare model have none
        "scale_embedding": f("scale_embedding", False),
        "attention_dropout": f("attention_dropout", 0.0),
        "residual_dropout": dropout,
        "embedding_dropout": dropout,
    }


def _read_marian(f: Fields, names: Collection[str]) -> dict[str, Any]:
    f.only(normalize_embedding=False, static_position_embeddings=True)
    return _read_bart(f, names) | {"position": "sinusoidal_half"}


def _read_bart_itself(f: Fields, names: Collection[str]) -> dict[str, Any]:
    f.only(normalize_embedding=True, static_position_embeddings=False)
    return _read_bart(f, names) | {"position": "learned", "position_offset": 2, "embedding_norm": True}


def _write_bart(cfg: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": cfg.vocab_size,
        "d_model": cfg.d_model,
        "decoder_layers": cfg.n_layers,
        "encoder_layers": cfg.encoder_layers,
        "decoder_attention_heads": cfg.n_heads,
        "encoder_attention_heads": cfg.encoder_heads or cfg.n_heads,
        "decoder_ffn_dim": cfg.d_ff,
        "encoder_ffn_dim": cfg.encoder_d_ff or cfg.d_ff,
        "max_position_embeddings": cfg.max_length,
        "decoder_start_token_id": cfg.start_token,
        "activation_function": inverse(PLAIN, cfg.mlp),
        "scale_embedding": cfg.scale_embedding,
        "tie_word_embeddings": cfg.tied_head,
        "attention_dropout": cfg.execution.attention_dropout,
        "dropout": cfg.execution.residual_dropout,
        "is_encoder_decoder": True,
        "forced_eos_token_id": None,  # 2 where it is not said
    }


def _bart_tensors(cfg: ModelConfig) -> Table:
    table: Table = {
        "embedding.token": Source("model.shared.weight", "VD"),
        "head.kernel": Source("lm_head.weight", "VD"),
        "head.bias": Source("final_logits_bias", "1V"),
    }
    for stack in ("encoder", "decoder"):
        block: Table = {
            **attention("attention", "self_attn", o="out_proj"),
            **normed("attention_norm", "self_attn_layer_norm"),
            **attention("cross_attention", "encoder_attn", o="out_proj"),
            **normed("cross_attention_norm", "encoder_attn_layer_norm"),
            **linear("mlp.up", "fc1", "F", "D"),
            **linear("mlp.down", "fc2", "D", "F"),
            **normed("mlp_norm", "final_layer_norm"),
        }
        table |= layers(stack, f"model.{stack}.layers", block)
        table |= normed(f"{stack}.embedding_norm", f"model.{stack}.layernorm_embedding")
        table[f"{stack}.position.table"] = Source(f"model.{stack}.embed_positions.weight", "PD")
    return table


_BART_SAME = {f"model.{name}": path for name, path in SHARED_TABLE.items()} | {"lm_head.weight": "embedding.token"}

FAMILIES = (
    Family(
        "bert",
        "BertForMaskedLM",
        _read_bert,
        _write_bert,
        _bert_tensors,
        prefix="bert.",
        same={"cls.predictions.decoder.weight": "embedding.token", "cls.predictions.decoder.bias": "head.bias"},
        buffers=(r".*embeddings\.position_ids",),
        older=(("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")),
    ),
    Family(
        "marian",
        "MarianMTModel",
        _read_marian,
        _write_bart,
        _bart_tensors,
        same=_BART_SAME,
        prefix="model.",
        buffers=(r"model\.(en|de)coder\.embed_positions\.weight",),
        constant=lambda cfg, name: np.asarray(position.half_sinusoids(jnp.arange(cfg.max_length), cfg.d_model)),
    ),
    Family(
        "bart",
        "BartForConditionalGeneration",
        _read_bart_itself,
        _write_bart,
        _bart_tensors,
        prefix="model.",
        same=_BART_SAME,
    ),
)
