"""BERT."""

from jaxformer.config import ModelConfig
from jaxformer.hf.families.common import PLAIN, SIZES
from jaxformer.hf.family import Family, Field, Rule
from jaxformer.hf.layout import Source, Table, attention, layers, linear, normed

# config.json does not say which heads a file has.
HEAD = Rule(lambda reader: any(name.startswith("cls.predictions.") for name in reader.tensors))
POOLER = Rule(lambda reader: any(name.removeprefix("bert.").startswith("pooler.") for name in reader.tensors))


def _tensors(cfg: ModelConfig) -> Table:
    block = (
        attention("attention", "attention", "self.query", "self.key", "self.value", "output.dense")
        | normed("attention_norm", "attention.output.LayerNorm")
        | linear("mlp.up", "intermediate.dense", "F", "D")
        | linear("mlp.down", "output.dense", "D", "F")
        | normed("mlp_norm", "output.LayerNorm")
    )
    return {
        "embedding.token": Source("bert.embeddings.word_embeddings.weight", "VD"),
        "embedding.type": Source("bert.embeddings.token_type_embeddings.weight", "PD"),
        "decoder.position.table": Source("bert.embeddings.position_embeddings.weight", "PD"),
        **normed("decoder.embedding_norm", "bert.embeddings.LayerNorm"),
        **layers("decoder", "bert.encoder.layer", block),
        "pooler.kernel": Source("bert.pooler.dense.weight", "OD"),
        "pooler.bias": Source("bert.pooler.dense.bias", "O"),
        "head.transform.kernel": Source("cls.predictions.transform.dense.weight", "OD"),
        "head.transform.bias": Source("cls.predictions.transform.dense.bias", "O"),
        **normed("head.transform.norm", "cls.predictions.transform.LayerNorm"),
        "head.kernel": Source("cls.predictions.decoder.weight", "VD"),
        "head.bias": Source("cls.predictions.bias", "V"),
    }


FAMILIES = {
    "bert": Family(
        "BertForMaskedLM",
        SIZES
        | {
            "norm": "layer",
            "norm_eps": Field("layer_norm_eps", 1e-12),
            "mlp": Field("hidden_act", "gelu", PLAIN),
            "residual": "post",
            "position": "learned",
            "causal": False,
            "qkv_bias": True,
            "out_bias": True,
            "mlp_bias": True,
            "embedding_norm": True,
            "token_types": Field("type_vocab_size", 2),
            "has_head": HEAD,
            "head_transform": HEAD,
            "head_bias": HEAD,
            "pooler": POOLER,
            "tied_head": Field("tie_word_embeddings", True),
            "execution.attention_dropout": Field("attention_probs_dropout_prob", 0.1),
            "execution.residual_dropout": Field("hidden_dropout_prob", 0.1),
            "execution.embedding_dropout": Field("hidden_dropout_prob", 0.1),
        },
        _tensors,
        only={"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
        ignored=("pooler_(fc_size|num_attention_heads|num_fc_layers|size_per_head|type)", "directionality"),
        prefix="bert.",
        copies={"cls.predictions.decoder.weight": "embedding.token", "cls.predictions.decoder.bias": "head.bias"},
        buffers=(r".*embeddings\.position_ids",),
        older=(("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")),
    ),
}
