"""The two ends of a model, which may share a table: tokens to vectors by the embedding, hidden states to logits by the head."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.config.spec import bias, weight
from jaxformer.nn import mlp, norm
from jaxformer.nn.dense import by_matrices, dense, precision
from jaxformer.nn.inputs import Embeddings
from jaxformer.nn.named import multiply, named
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


def head_spec(cfg: ModelConfig) -> dict:
    """Parameters of the head; none for a model without, or with nothing of its own."""
    if not cfg.has_head:
        return {}
    head: dict = {} if cfg.tied_head else {"kernel": weight(cfg, "D", "V")}
    if cfg.head_bias:
        head["bias"] = bias("V")
    if cfg.head_transform:
        head["transform"] = square(cfg) | {"norm": norm.spec(cfg)}
    return head


def square(cfg: ModelConfig) -> dict:
    """A map from D to a result of the same width, with bias."""
    return {"kernel": weight(cfg, "D", "O"), "bias": bias("O")}


def head(params: dict, x_BTD: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Logits [B, T, V] in float32, soft-capped if the config says so."""
    require_head(cfg)
    if cfg.scale_head:
        x_BTD = x_BTD * jnp.asarray(cfg.d_model**-0.5, x_BTD.dtype)
    with precision(cfg):
        if cfg.head_transform:
            x_BTD = _transform(params["head"]["transform"], x_BTD, cfg)
        if cfg.tied_head:
            weight_VD = gathered(params["embedding"]["token"].astype(x_BTD.dtype), "VD")
            how = _computed_by(lambda x_BTD, weight_VD: _product(x_BTD, weight_VD.T))
            logits = multiply("BTD,VD->BTV", x_BTD, weight_VD, name="head", **how)
        else:
            weight_DV = gathered(params["head"]["kernel"].astype(x_BTD.dtype), "DV")
            how = _computed_by(_product)
            logits = multiply("BTD,DV->BTV", x_BTD, weight_DV, name="head", **how)
    if cfg.head_bias:
        logits = logits + params["head"]["bias"].astype(jnp.float32)
    if cfg.logit_softcap is not None:
        logits = cfg.logit_softcap * jnp.tanh(logits / cfg.logit_softcap)
    return named(logits, "logits", "BTV", cfg)


def _computed_by(product: Callable[[jax.Array, jax.Array], jax.Array]) -> dict[str, Any]:
    """The options of ``multiply`` for logits: ``product`` where matrices are faster, else the equation itself, in float32."""
    return {"by": product} if by_matrices() else {"preferred_element_type": jnp.float32}


def _product(x_BTD: jax.Array, weight_DV: jax.Array) -> jax.Array:
    """The logits, of one matrix of all positions (``dense.by_matrices``)."""
    rows, positions, width = x_BTD.shape
    logits = jnp.matmul(x_BTD.reshape(-1, width), weight_DV, preferred_element_type=jnp.float32)
    return logits.reshape(rows, positions, -1)


def in_float32(params: dict, cfg: ModelConfig) -> tuple[dict, Callable[[dict], dict]]:
    """The parameters of the head that are stored in less, in float32, and the function that takes them back, exactly. A scan
    that takes them back in every step adds up their gradients in float32, where one that reads them as they are would round
    the sum at each step."""
    ends = {name: params[name] for name in (["embedding"] if cfg.tied_head else []) + ["head"] if name in params}
    is_low = lambda p: jnp.issubdtype(p.dtype, jnp.floating) and p.dtype.itemsize < 4
    wide = jax.tree.map(lambda p: p.astype(jnp.float32) if is_low(p) else p, ends)
    return wide, lambda wide: params | jax.tree.map(lambda p, x: x.astype(p.dtype), ends, wide)


def require_config(cfg: ModelConfig) -> None:
    """Raises ValueError for what is not a config."""
    if not isinstance(cfg, ModelConfig):
        raise ValueError(f"cfg must be a ModelConfig, the third argument after params and tokens, not {type(cfg).__name__}")


def require_head(cfg: ModelConfig) -> None:
    """Raises ValueError for a model without a head."""
    require_config(cfg)
    if not cfg.has_head:
        raise ValueError("the model has no head (has_head=False) and so no logits; use jf.hidden")


def _transform(params: dict, x_BTD: jax.Array, cfg: ModelConfig) -> jax.Array:
    y_BTO = mlp.ACTIVATIONS[cfg.mlp](dense("BTD,DO->BTO", x_BTD, params["kernel"], params["bias"]))
    return norm.apply(params["norm"], y_BTO, cfg)


def pooled(params: dict, x_BTD: jax.Array, cfg: ModelConfig) -> jax.Array:
    """What a model with a ``pooler`` makes of its hidden states: tanh of a linear map of the first token's, [B, D]."""
    if not cfg.pooler:
        raise ValueError("the model has no pooler (pooler=False)")
    with precision(cfg):
        return jnp.tanh(dense("BTD,DO->BTO", x_BTD[:, :1], params["pooler"]["kernel"], params["pooler"]["bias"]))[:, 0]
