"""Tokens to vectors: rows of the embedding table, or embeddings that the caller gives in their place."""

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.nn.inputs import Embeddings
from jaxformer.nn.named import named
from jaxformer.parallel.sharding import gathered


def embed(
    params: dict,
    tokens: jax.Array | None,
    cfg: ModelConfig,
    types: jax.Array | None = None,
    embeddings: Embeddings | None = None,
) -> jax.Array:
    """[B, T, D] in the compute dtype: rows of the table, or ``embeddings`` where they are given, times sqrt(D) if the config
    says so, plus the rows of the token types."""

    def rows(name, ids):
        table = gathered(jnp.asarray(params["embedding"][name], cfg.execution.dtype), "VD" if name == "token" else "PD")
        return table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)

    if embeddings is None:
        x_BTD = rows("token", tokens)
    elif tokens is None or embeddings.mask is None:
        x_BTD = embeddings.values.astype(cfg.execution.dtype)
    else:
        x_BTD = jnp.where(embeddings.mask[..., None], embeddings.values.astype(cfg.execution.dtype), rows("token", tokens))
    if cfg.scale_embedding:
        x_BTD = x_BTD * jnp.asarray(cfg.d_model**0.5, x_BTD.dtype)
    if types is not None:
        x_BTD = x_BTD + rows("type", types)
    return named(x_BTD, "embedding", "BTD", cfg)
