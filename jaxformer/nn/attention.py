"""Attention: softmax(q kᵀ / sqrt(H) + M) v over K·G query heads that share K key/value heads.

One path for MHA (G = 1), GQA and MQA (K = 1), for self- and cross-attention, for whole sequences and cached steps.
Activations are ``[B, K, G, T, H]``, written by the projections themselves, so that no head is ever moved.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.config.components import Component, resolve
from jaxformer.config.spec import Param, bias, weight, zeros
from jaxformer.nn import latent, norm, position
from jaxformer.nn.attend import mix
from jaxformer.nn.cache import KeyValue, LayerCache
from jaxformer.nn.dense import dense, dropout
from jaxformer.nn.mask import TokenInfo, arange
from jaxformer.nn.named import named


def spec(cfg: ModelConfig) -> dict:
    """Parameters of ``cfg.attention``."""
    return resolve("attention", cfg.attention, CHOICES).spec(cfg)


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
    """[B, T, D] -> [B, T, D], and the cache that has seen the tokens (None without one). Every attention component takes
    these arguments.

    info: where the queries stand (positions 0 … T − 1 unless given). position_params: those of ``cfg.position``, if it has
    any. cross_attention_kv: keys and values to read instead of the sequence's own; neither causality nor positions apply to
    them. cache: what this layer has kept of the tokens before. rng: turns dropout on.
    """
    component = resolve("attention", cfg.attention, CHOICES)
    where = {"info": info, "position_params": position_params, "cross_attention_kv": cross_attention_kv}
    return component.apply(params, x_BTD, cfg, **where, cache=cache, rng=rng)


def grouped_spec(cfg: ModelConfig) -> dict:
    """Projections of N = K·G query heads and K key/value heads, and of their mix back to the residual stream."""
    params: dict[str, Any] = {
        "query": weight(cfg, "D", "KGH"),
        "key": weight(cfg, "D", "KH"),
        "value": weight(cfg, "D", "KH"),
        "out": weight(cfg, "KGH", "D", residual=True),
    }
    if cfg.qkv_bias:
        params |= {"query_bias": bias("KGH"), "key_bias": bias("KH"), "value_bias": bias("KH")}
    if cfg.out_bias:
        params["out_bias"] = bias("D")
    if cfg.qk_norm != "none":
        query, key = ("H", "H") if cfg.qk_norm == "head" else ("KGH", "KH")
        params |= {"query_norm": norm.spec(cfg, query), "key_norm": norm.spec(cfg, key)}
    return params


def grouped_apply(
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
    """Multi-head, grouped-query or multi-query attention; arguments and results are those of ``apply``."""
    info = arange(x_BTD.shape[1]) if info is None else info
    crossing = cross_attention_kv is not None
    site = "input" if crossing else position.site(cfg)
    encode = functools.partial(position.apply, position_params or {})
    q_BKGTH = query(params, x_BTD, cfg)
    if cross_attention_kv is not None:
        k_BKSH, v_BKSH, key_info = cross_attention_kv
    else:
        k_BKSH, v_BKSH, key_info = key_value(params, x_BTD, cfg, info)
        if site == "heads":
            q_BKGTH, k_BKSH = encode(q_BKGTH, info.position, cfg), encode(k_BKSH, info.position, cfg)
        if cache is not None:
            kept, key_info, cache = cache.extend({"key": k_BKSH, "value": v_BKSH})
            k_BKSH, v_BKSH = kept["key"], kept["value"]
    q_BKGTH = named(q_BKGTH, "query", "BKGTH", cfg)
    k_BKSH, v_BKSH = named(k_BKSH, "key", "BKSH", cfg), named(v_BKSH, "value", "BKSH", cfg)

    def observe(weights_BKGTS):
        weights_BKGTS = named(weights_BKGTS, "weights", "BKGTS", cfg)
        return dropout(weights_BKGTS, cfg.execution.attention_dropout, rng)

    mixed_BKGTH = mix(
        q_BKGTH,
        k_BKSH,
        v_BKSH,
        info,
        key_info,
        cfg,
        crossing=crossing,
        scale=cfg.attention_scale,
        bias=encode((info.position, key_info.position), cfg) if site == "scores" else None,
        dropout=rng is not None and cfg.execution.attention_dropout > 0,
        observe=observe,
    )
    mixed_BKGTH = named(mixed_BKGTH, "mixed", "BKGTH", cfg, labelled=True)
    return dense("BKGTH,KGHD->BTD", mixed_BKGTH, params["out"], params.get("out_bias")), cache


def grouped_cache(cfg: ModelConfig) -> dict[str, Param]:
    """Keys and values of the K heads, as they are read."""
    return {"key": Param("BKSH", zeros), "value": Param("BKSH", zeros)}


def source_key_value(params: dict, x_BSD: jax.Array, info: TokenInfo, cfg: ModelConfig) -> KeyValue:
    """What cross-attention reads of the encoder's output, by the component's own ``key_value``."""
    component = resolve("attention", cfg.attention, CHOICES)
    if getattr(component, "key_value", None) is None:
        raise ValueError(f"attention={cfg.attention!r} needs key_value(params, x, cfg, info) to serve as cross-attention")
    return component.key_value(params, x_BSD, cfg, info)


def query(params: dict, x_BTD: jax.Array, cfg: ModelConfig) -> jax.Array:
    """[B, K, G, T, H]"""
    q_BKGTH = dense("BTD,DKGH->BKGTH", x_BTD, params["query"], _over_time(params.get("query_bias")))
    return _normed(params, "query_norm", q_BKGTH, cfg)


def key_value(params: dict, x_BSD: jax.Array, cfg: ModelConfig, info: TokenInfo) -> KeyValue:
    """Keys and values [B, K, S, H] of a sequence, and where the tokens stand."""
    k_BKSH = dense("BSD,DKH->BKSH", x_BSD, params["key"], _over_time(params.get("key_bias")))
    v_BKSH = dense("BSD,DKH->BKSH", x_BSD, params["value"], _over_time(params.get("value_bias")))
    return _normed(params, "key_norm", k_BKSH, cfg), v_BKSH, info


def _normed(params: dict, name: str, x: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Queries or keys [B, K, (G,) T, H], normalised as the config says."""
    if cfg.qk_norm == "none":
        return x
    if cfg.qk_norm == "head":
        return norm.apply(params[name], x, cfg)
    heads_last = jnp.moveaxis(x, -2, 1)  # [B, T, K, (G,) H]
    flat = heads_last.reshape(*heads_last.shape[:2], -1)
    normed = norm.apply(jax.tree.map(jnp.ravel, params[name]), flat, cfg)
    return jnp.moveaxis(normed.reshape(heads_last.shape), 1, -2)


def _over_time(head_bias: jax.Array | None) -> jax.Array | None:
    return None if head_bias is None else head_bias[..., None, :]  # [K, (G,) H] -> [K, (G,) 1, H]


CHOICES = {
    "grouped": Component(grouped_spec, grouped_apply, key_value=key_value, cache=grouped_cache),
    "latent": Component(latent.spec, latent.apply, cache=latent.cache),
}
