"""Multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3, section 2.2): a block more, which predicts the token after the next.

It reads what the head reads at a position, joined with the embedding of the next token, and the head reads it in turn.
"""

import dataclasses
from typing import Any

import jax

from jaxformer.config import ModelConfig
from jaxformer.nn import block, norm
from jaxformer.nn.dense import dense
from jaxformer.nn.mask import Places
from jaxformer.spec import Param, bound, kernel


def spec(cfg: ModelConfig) -> dict:
    """Norms of the two that are joined, their maps to D (the letter F stands for the result), a block like the last, a norm."""
    own = dataclasses.replace(cfg, d_ff=cfg.d_model)

    def half() -> Param:
        return dataclasses.replace(kernel(own, "D", "F"), sizes=(("F", cfg.d_model),))

    layer = cfg.layers[-1]
    return {
        "token_norm": norm.spec(cfg),
        "hidden_norm": norm.spec(cfg),
        "join_token": half(),
        "join_hidden": half(),
        "layer": bound(block.spec(layer), layer),
        "norm": norm.spec(cfg),
    }


def config(cfg: ModelConfig) -> ModelConfig:
    """Of the block, as a stack of its own: what a cache of it is made for."""
    return dataclasses.replace(cfg.layers[-1], n_layers=1, mtp=False)


def apply(
    params: dict,
    token_BTD: jax.Array,
    hidden_BTD: jax.Array,
    cfg: ModelConfig,
    *,
    places: Places | None = None,
    extend: Any = None,
    key: jax.Array | None = None,
    routed: Any = None,
) -> jax.Array:
    """[B, T, D], for the head, of the next tokens' embeddings and what the head read. Keywords as ``block.apply``'s."""
    token_BTD = norm.apply(params["token_norm"], token_BTD, cfg)
    hidden_BTD = norm.apply(params["hidden_norm"], hidden_BTD, cfg)
    x_BTD = dense("BTD,DF->BTF", token_BTD, params["join_token"]) + dense("BTD,DF->BTF", hidden_BTD, params["join_hidden"])
    x_BTD = block.apply(params["layer"], x_BTD, cfg.layers[-1], places=places, extend=extend, key=key, routed=routed)
    return norm.apply(params["norm"], x_BTD, cfg)
