"""Latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1): keys and values are linear maps of a latent of R numbers.

A head's query and key have a part without positions, [H], and a rotary part; the rotary key is one for all heads. Two forms
with the same numbers: plain makes every head's keys and values; absorbed takes queries to the latent instead, and its mix back,
so that a cache is read as it is kept: R + rotary width numbers a token. Whole sequences use the first, decoding steps the
second.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.nn import norm, position
from jaxformer.nn.attend import Entries
from jaxformer.nn.dense import dense, dropout
from jaxformer.nn.kernels import mix
from jaxformer.nn.mask import Places, arange
from jaxformer.nn.named import multiply, named
from jaxformer.sharding import gathered
from jaxformer.spec import Param, kernel, zeros


def spec(cfg: ModelConfig) -> dict:
    """Maps to the queries (through a latent of Q numbers, if the config has one), to the latent of keys and values and the
    rotary key, from the latent to every head's key and value, and back to the residual stream."""
    own = cfg.latent
    key_width = cfg.head_dim + own.rope_dim
    query: dict[str, Any] = {"query": _map(cfg, "D", "KH", key_width)}
    if own.query_rank:
        query = {
            "query_down": kernel(cfg, "D", "Q"),
            "query_norm": norm.spec(cfg, "Q"),
            "query": _map(cfg, "Q", "KH", key_width),
        }
    return query | {
        "latent": dataclasses.replace(kernel(cfg, "D", "R"), sizes=(("H", own.rope_dim),)),  # files join it with key_rope
        "latent_norm": norm.spec(cfg, "R"),
        "key_rope": _map(cfg, "D", "H", own.rope_dim),
        "key_value": _map(cfg, "R", "KH", cfg.head_dim + own.value_dim),
        "out": _map(cfg, "KH", "D", own.value_dim, residual=True),
    }


def _map(cfg: ModelConfig, inputs: str, outputs: str, width: int, residual: bool = False) -> Param:
    """A kernel whose H is of that width."""
    sized = dataclasses.replace(cfg, head_dim=width)
    return dataclasses.replace(kernel(sized, inputs, outputs, residual=residual), sizes=(("H", width),))


def cache(cfg: ModelConfig) -> dict[str, Param]:
    """The normed latent and the rotated key."""
    return {"latent": Param("BSR", zeros), "key_rope": Param("BSH", zeros, sizes=(("H", cfg.latent.rope_dim),))}


def apply(
    params: dict,
    x_BTD: jax.Array,
    cfg: ModelConfig,
    *,
    places: Places | None = None,
    position_params: dict | None = None,
    memory: Any = None,
    extend: Callable[[Entries], tuple[Entries, Places]] | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """[B, T, D] -> [B, T, D]. Keywords as in ``attention.grouped_apply``; it does not cross (memory)."""
    if memory is not None:
        raise ValueError("attention='latent' does not serve as cross-attention")
    places = arange(x_BTD.shape[1]) if places is None else places
    own = dataclasses.replace(cfg, norm_eps=cfg.latent.norm_eps)
    rotate = functools.partial(position.apply, position_params or {})
    if "query_down" in params:
        latent_BTQ = norm.apply(params["query_norm"], dense("BTD,DQ->BTQ", x_BTD, params["query_down"]), own)
        q_BKTH = dense("BTQ,QKH->BKTH", latent_BTQ, params["query"])
    else:
        q_BKTH = dense("BTD,DKH->BKTH", x_BTD, params["query"])
    q_BKTH, turned_BKTH = jnp.split(q_BKTH, [cfg.head_dim], axis=-1)
    turned_BKTH = rotate(turned_BKTH, places.position, cfg)
    latent_BSR = norm.apply(params["latent_norm"], dense("BTD,DR->BTR", x_BTD, params["latent"]), own)
    key_BSH = rotate(dense("BTD,DH->BTH", x_BTD, params["key_rope"])[:, None], places.position, cfg)[:, 0]
    key_places = places
    if extend is not None:
        kept, key_places = extend({"latent": latent_BSR, "key_rope": key_BSH})
        latent_BSR, key_BSH = kept["latent"], kept["key_rope"]

    def observe(weights_BKGTS):
        absorbed = weights_BKGTS.shape[1] == 1  # all heads read one key: they stand where G does
        weights_BKGTS = jnp.swapaxes(weights_BKGTS, 1, 2) if absorbed else weights_BKGTS
        weights_BKGTS = dropout(named(weights_BKGTS, "weights", "BKGTS", cfg), cfg.attention_dropout, key)
        return jnp.swapaxes(weights_BKGTS, 1, 2) if absorbed else weights_BKGTS

    scale = (cfg.head_dim + cfg.latent.rope_dim) ** -0.5 if cfg.attention_scale is None else cfg.attention_scale
    dropping = key is not None and cfg.attention_dropout > 0
    given = {"places": places, "key_places": key_places, "scale": scale, "dropout": dropping, "observe": observe}
    form = _absorbed if extend is not None and absorbing(x_BTD.shape[1], latent_BSR.shape[1], cfg) else _plain
    mixed_BKTH = form(params["key_value"], q_BKTH, turned_BKTH, latent_BSR, key_BSH, cfg, given)
    return dense("BKTH,KHD->BTD", mixed_BKTH, params["out"])


def absorbing(queries: int, keys: int, cfg: ModelConfig) -> bool:
    """Whether the absorbed form multiplies less, for so many queries and keys: for short chunks, and steps of decoding."""
    rank, width = cfg.latent.rank, cfg.head_dim + cfg.latent.value_dim
    plain = keys * rank * width + queries * keys * (width + cfg.latent.rope_dim)
    return queries * rank * width + queries * keys * (2 * rank + cfg.latent.rope_dim) < plain


def _plain(kernel_RKH, q_BKTH, turned_BKTH, latent_BSR, key_BSH, cfg, given):
    both_BKSH = dense("BSR,RKH->BKSH", latent_BSR, kernel_RKH)
    k_BKSH, v_BKSH = jnp.split(both_BKSH, [cfg.head_dim], axis=-1)
    rope_BKSH = jnp.broadcast_to(key_BSH[:, None], (*k_BKSH.shape[:3], key_BSH.shape[-1]))
    q_BKGTH = jnp.concatenate([q_BKTH, turned_BKTH], axis=-1)[:, :, None]
    return mix(q_BKGTH, jnp.concatenate([k_BKSH, rope_BKSH], axis=-1), v_BKSH, cfg=cfg, **given)[:, :, 0]


def _absorbed(kernel_RKH, q_BKTH, turned_BKTH, latent_BSR, key_BSH, cfg, given):
    key_RKH, value_RKH = jnp.split(gathered(kernel_RKH.astype(q_BKTH.dtype), "RKH"), [cfg.head_dim], axis=-1)
    q_BKTR = multiply("BKTH,RKH->BKTR", q_BKTH, key_RKH, name="query_latent")
    # The rotary part comes as a bias, so that the cache's two tensors need not be joined, which would copy them at every step.
    asked = {"name": "rotary_scores", "preferred_element_type": jnp.float32}
    rotary = multiply("BKTH,BSH->BKTS", turned_BKTH, key_BSH, **asked) * given["scale"]
    latent_BKSR = latent_BSR[:, None]
    mixed_BKTR = mix(q_BKTR[:, None], latent_BKSR, latent_BKSR, cfg=cfg, bias=rotary[:, None], **given)[:, 0]
    return multiply("BKTR,RKH->BKTH", mixed_BKTR, value_RKH, name="value")
