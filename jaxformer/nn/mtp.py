"""Multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3, section 2.2): one more block, which predicts the token after the next.

It reads what the head reads at a position, joined with the embedding of the next token, and the head reads it in turn.
"""

import dataclasses
from typing import Any

import jax

from jaxformer.config import ModelConfig
from jaxformer.config.spec import bound, weight
from jaxformer.nn import block, norm
from jaxformer.nn.block import BlockOutput
from jaxformer.nn.cache import LayerCache
from jaxformer.nn.dense import dense
from jaxformer.nn.mask import TokenInfo


def spec(cfg: ModelConfig) -> dict:
    """Norms of the two inputs that are joined, their maps to D, a block like the last one, a norm."""
    layer = cfg.layers[-1]
    return {
        "token_norm": norm.spec(cfg),
        "hidden_norm": norm.spec(cfg),
        "join_token": weight(cfg, "D", "O"),
        "join_hidden": weight(cfg, "D", "O"),
        "layer": bound(block.spec(layer), layer),
        "norm": norm.spec(cfg),
    }


def config(cfg: ModelConfig) -> ModelConfig:
    """The config of the block as a stack of its own, which a cache of it is made for."""
    return dataclasses.replace(cfg.layers[-1], n_layers=1, mtp=False)


def apply(
    params: dict,
    token_BTD: jax.Array,
    hidden_BTD: jax.Array,
    cfg: ModelConfig,
    *,
    info: TokenInfo | None = None,
    cache: LayerCache | None = None,
    rng: jax.Array | None = None,
    counted: Any = None,
    training: bool = False,
) -> BlockOutput:
    """What the head reads, [B, T, D], from the embeddings of the next tokens and what the head read. Keywords as in
    ``block.apply``."""
    token_BTD = norm.apply(params["token_norm"], token_BTD, cfg)
    hidden_BTD = norm.apply(params["hidden_norm"], hidden_BTD, cfg)
    x_BTD = dense("BTD,DO->BTO", token_BTD, params["join_token"]) + dense("BTD,DO->BTO", hidden_BTD, params["join_hidden"])
    out = block.apply(
        params["layer"], x_BTD, cfg.layers[-1], info=info, cache=cache, rng=rng, counted=counted, training=training
    )
    return out._replace(x_BTD=norm.apply(params["norm"], out.x_BTD, cfg))
