"""What several families share."""

from jaxformer.hf.family import Field, Fields

SIZES: Fields = {
    "vocab_size": Field("vocab_size"),
    "d_model": Field("hidden_size"),
    "n_layers": Field("num_hidden_layers"),
    "n_heads": Field("num_attention_heads"),
    "d_ff": Field("intermediate_size"),
    "max_length": Field("max_position_embeddings"),
}
"""Rows of fields that most families spell alike."""
GELU_TANH = dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh")
PLAIN = {"relu": "relu", "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu"} | GELU_TANH
"""Their activation -> our feed-forward without a gate."""
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"} | dict.fromkeys(GELU_TANH, "geglu_tanh")
"""Their activation -> our gated feed-forward."""
SHARED_EMBEDDING = {f"{stack}.embed_tokens.weight": "embedding.token" for stack in ("encoder", "decoder")}
"""What files of encoder–decoders may repeat."""
