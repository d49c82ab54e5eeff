"""Latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1): keys and values are linear maps of a latent of R numbers.

A head's query and key have a part without positions, [H], and a rotary part; the rotary key is one for all heads. Two forms
with the same numbers: plain makes every head's keys and values; absorbed takes queries to the latent instead, and its mix back,
so that a cache is read as it is kept: R + rotary width values per token. Whole sequences use the first, decoding steps the
second.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.config.spec import Param, weight, zeros
from jaxformer.nn import norm, position
from jaxformer.nn.attend import mix
from jaxformer.nn.cache import KeyValue, LayerCache
from jaxformer.nn.dense import dense, dropout
from jaxformer.nn.mask import TokenInfo, arange
from jaxformer.nn.named import multiply, named
from jaxformer.parallel.sharding import gathered


def spec(cfg: ModelConfig) -> dict:
    """Maps to the queries (through a latent of Q numbers, if the config has one), to the latent of keys and values and the
    rotary key, from the latent to every head's key and value, and back to the residual stream."""
    latent = cfg.latent
    key_width = cfg.head_dim + latent.rope_dim
    query: dict[str, Any] = {"query": weight(cfg, "D", "KH", sizes={"H": key_width})}
    if latent.query_rank:
        query = {
            "query_down": weight(cfg, "D", "Q"),
            "query_norm": norm.spec(cfg, "Q"),
            "query": weight(cfg, "Q", "KH", sizes={"H": key_width}),
        }
    return query | {
        "latent": weight(cfg, "D", "R", sizes={"H": latent.rope_dim}),  # published files join it with key_rope
        "latent_norm": norm.spec(cfg, "R"),
        "key_rope": weight(cfg, "D", "H", sizes={"H": latent.rope_dim}),
        "key_value": weight(cfg, "R", "KH", sizes={"H": cfg.head_dim + latent.value_dim}),
        "out": weight(cfg, "KH", "D", residual=True, sizes={"H": latent.value_dim}),
    }


def cache(cfg: ModelConfig) -> dict[str, Param]:
    """The normed latent and the rotated key."""
    return {"latent": Param("BSR", zeros), "key_rope": Param("BSH", zeros, sizes=(("H", cfg.latent.rope_dim),))}


def apply(
    params: dict,
    x_BTD: jax.Array,
    cfg: ModelConfig,
    *,
    info: TokenInfo | None = None,
    position_params: dict | None = None,
    cross_attention_kv: KeyValue | None = None,
    cache: LayerCache | None = None,
    rng: jax.Array | None = None,
) -> tuple[jax.Array, LayerCache | None]:
    """Arguments and results are those of ``attention.apply``; it does not serve as cross-attention."""
    if cross_attention_kv is not None:
        raise ValueError("attention='latent' cannot be used as cross-attention")
    info = arange(x_BTD.shape[1]) if info is None else info
    latent_cfg = dataclasses.replace(cfg, norm_eps=cfg.latent.norm_eps)
    rotate = functools.partial(position.apply, position_params or {})
    if "query_down" in params:
        latent_BTQ = norm.apply(params["query_norm"], dense("BTD,DQ->BTQ", x_BTD, params["query_down"]), latent_cfg)
        q_BKTH = dense("BTQ,QKH->BKTH", latent_BTQ, params["query"])
    else:
        q_BKTH = dense("BTD,DKH->BKTH", x_BTD, params["query"])
    q_BKTH, turned_BKTH = jnp.split(q_BKTH, [cfg.head_dim], axis=-1)
    turned_BKTH = rotate(turned_BKTH, info.position, cfg)
    latent_BSR = norm.apply(params["latent_norm"], dense("BTD,DR->BTR", x_BTD, params["latent"]), latent_cfg)
    key_BSH = rotate(dense("BTD,DH->BTH", x_BTD, params["key_rope"])[:, None], info.position, cfg)[:, 0]
    key_info = info
    absorb = False
    if cache is not None:
        kept, key_info, cache = cache.extend({"latent": latent_BSR, "key_rope": key_BSH})
        latent_BSR, key_BSH = kept["latent"], kept["key_rope"]
        absorb = absorbing(x_BTD.shape[1], latent_BSR.shape[1], cfg)

    def observe(weights_BKGTS):
        absorbed = weights_BKGTS.shape[1] == 1  # all heads read one key: they stand where G does
        weights_BKGTS = jnp.swapaxes(weights_BKGTS, 1, 2) if absorbed else weights_BKGTS
        weights_BKGTS = dropout(named(weights_BKGTS, "weights", "BKGTS", cfg), cfg.execution.attention_dropout, rng)
        return jnp.swapaxes(weights_BKGTS, 1, 2) if absorbed else weights_BKGTS

    scale = (cfg.head_dim + cfg.latent.rope_dim) ** -0.5 if cfg.attention_scale is None else cfg.attention_scale
    dropping = rng is not None and cfg.execution.attention_dropout > 0
    options = {"info": info, "key_info": key_info, "scale": scale, "dropout": dropping, "observe": observe}
    form = _absorbed if absorb else _plain
    mixed_BKTH = form(params["key_value"], q_BKTH, turned_BKTH, latent_BSR, key_BSH, cfg, options)
    return dense("BKTH,KHD->BTD", mixed_BKTH, params["out"]), cache


def absorbing(queries: int, keys: int, cfg: ModelConfig) -> bool:
    """Whether the absorbed form multiplies less, at these lengths: for short chunks, and steps of decoding."""
    rank, width = cfg.latent.rank, cfg.head_dim + cfg.latent.value_dim
    plain = keys * rank * width + queries * keys * (width + cfg.latent.rope_dim)
    return queries * rank * width + queries * keys * (2 * rank + cfg.latent.rope_dim) < plain


def _plain(weight_RKH, q_BKTH, turned_BKTH, latent_BSR, key_BSH, cfg, options):
    both_BKSH = dense("BSR,RKH->BKSH", latent_BSR, weight_RKH)
    k_BKSH, v_BKSH = jnp.split(both_BKSH, [cfg.head_dim], axis=-1)
    rope_BKSH = jnp.broadcast_to(key_BSH[:, None], (*k_BKSH.shape[:3], key_BSH.shape[-1]))
    q_BKGTH = jnp.concatenate([q_BKTH, turned_BKTH], axis=-1)[:, :, None]
    return mix(q_BKGTH, jnp.concatenate([k_BKSH, rope_BKSH], axis=-1), v_BKSH, cfg=cfg, **options)[:, :, 0]


def _absorbed(weight_RKH, q_BKTH, turned_BKTH, latent_BSR, key_BSH, cfg, options):
    key_RKH, value_RKH = jnp.split(gathered(weight_RKH.astype(q_BKTH.dtype), "RKH"), [cfg.head_dim], axis=-1)
    q_BKTR = multiply("BKTH,RKH->BKTR", q_BKTH, key_RKH, name="query_latent")
    # The rotary part comes as a bias, so that the cache's two tensors need not be joined, which would copy them at every step.
    asked = {"name": "rotary_scores", "preferred_element_type": jnp.float32}
    rotary = multiply("BKTH,BSH->BKTS", turned_BKTH, key_BSH, **asked) * options["scale"]
    latent_BKSR = latent_BSR[:, None]
    mixed_BKTR = mix(q_BKTR[:, None], latent_BKSR, latent_BKSR, cfg=cfg, bias=rotary[:, None], **options)[:, 0]
    return multiply("BKTR,RKH->BKTH", mixed_BKTR, value_RKH, name="value")
