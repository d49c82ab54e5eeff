"""Attention: softmax(q kᵀ / sqrt(H) + M) v over K·G query heads that share K key/value heads.

One path for MHA (G = 1), GQA and MQA (K = 1), for self- and cross-attention, for whole sequences and cached steps.
Activations are ``[B, K, G, T, H]``, written by the projections themselves, so that no head is ever moved.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.component import Component, resolve
from jaxformer.config import ModelConfig
from jaxformer.nn import latent, norm, position
from jaxformer.nn.attend import Entries
from jaxformer.nn.dense import dense, dropout
from jaxformer.nn.kernels import mix
from jaxformer.nn.mask import Places, arange
from jaxformer.nn.named import named
from jaxformer.spec import Param, bias, kernel, zeros


def spec(cfg: ModelConfig) -> dict:
    """Parameters of ``cfg.attention``."""
    return resolve("attention", cfg.attention).spec(cfg)


def apply(params: dict, x_BTD: jax.Array, cfg: ModelConfig, **where) -> jax.Array:
    """[B, T, D] -> [B, T, D]. Keywords as ``grouped_apply``'s; with none, self-attention over places 0 … T − 1."""
    return resolve("attention", cfg.attention).apply(params, x_BTD, cfg, **where)


def grouped_spec(cfg: ModelConfig) -> dict:
    """Projections of N = K·G query heads and K key/value heads, and of their mix back to the residual stream."""
    params: dict[str, Any] = {
        "query": kernel(cfg, "D", "KGH"),
        "key": kernel(cfg, "D", "KH"),
        "value": kernel(cfg, "D", "KH"),
        "out": kernel(cfg, "KGH", "D", residual=True),
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
    places: Places | None = None,
    position_params: dict | None = None,
    memory: "KeyValue | None" = None,
    extend: "Callable[[Entries], tuple[Entries, Places]] | None" = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """[B, T, D] -> [B, T, D].

    places: where the queries stand (0 … T − 1 if not given). position_params: those of ``cfg.position``, if it has any.
    memory: keys and values to read instead of the sequence's own (cross-attention: no causality, no positions). extend:
    adds what the sequence itself offers, under the names of ``cache``, to what is kept so far, and gives all of it and where it
    stands. key: turns dropout on.
    """
    places = arange(x_BTD.shape[1]) if places is None else places
    site = position.site(cfg) if memory is None else "input"
    encode = functools.partial(position.apply, position_params or {})
    q_BKGTH = query(params, x_BTD, cfg)
    crossing = memory is not None
    if memory is None:
        memory = key_value(params, x_BTD, cfg, places)
        if site == "heads":
            q_BKGTH = encode(q_BKGTH, places.position, cfg)
            memory = (encode(memory[0], places.position, cfg), *memory[1:])
        if extend is not None:
            kept, key_places = extend({"key": memory[0], "value": memory[1]})
            memory = kept["key"], kept["value"], key_places
    k_BKSH, v_BKSH, key_places = memory
    q_BKGTH = named(q_BKGTH, "query", "BKGTH", cfg)
    k_BKSH, v_BKSH = named(k_BKSH, "key", "BKSH", cfg), named(v_BKSH, "value", "BKSH", cfg)

    def observe(weights_BKGTS):
        weights_BKGTS = named(weights_BKGTS, "weights", "BKGTS", cfg)
        return dropout(weights_BKGTS, cfg.attention_dropout, key)

    mixed_BKGTH = mix(
        q_BKGTH,
        k_BKSH,
        v_BKSH,
        places,
        key_places,
        cfg,
        crossing=crossing,
        scale=cfg.attention_scale,
        bias=encode((places.position, key_places.position), cfg) if site == "scores" else None,
        dropout=key is not None and cfg.attention_dropout > 0,
        observe=observe,
    )
    mixed_BKGTH = named(mixed_BKGTH, "mixed", "BKGTH", cfg)
    return dense("BKGTH,KGHD->BTD", mixed_BKGTH, params["out"], params.get("out_bias"))


KeyValue = tuple[jax.Array, jax.Array, Places]


def cache(cfg: ModelConfig) -> dict[str, Param]:
    """What the component keeps of a sequence while decoding: named tensors with letters, among them B and S."""
    component = resolve("attention", cfg.attention)
    if getattr(component, "cache", None) is None:
        raise ValueError(f"attention={cfg.attention!r} needs cache(cfg), what it keeps of a sequence, to decode with a cache")
    return component.cache(cfg)


def grouped_cache(cfg: ModelConfig) -> dict[str, Param]:
    """Keys and values of the K heads, as they are read."""
    return {"key": Param("BKSH", zeros), "value": Param("BKSH", zeros)}


def source_key_value(params: dict, x_BSD: jax.Array, cfg: ModelConfig, places: Places) -> KeyValue:
    """What cross-attention reads of the encoder's output, by the component's own ``key_value``."""
    component = resolve("attention", cfg.attention)
    if getattr(component, "key_value", None) is None:
        raise ValueError(f"attention={cfg.attention!r} needs key_value(params, x, cfg, places) to serve as cross-attention")
    return component.key_value(params, x_BSD, cfg, places)


def query(params: dict, x_BTD: jax.Array, cfg: ModelConfig) -> jax.Array:
    """[B, K, G, T, H]"""
    q_BKGTH = dense("BTD,DKGH->BKGTH", x_BTD, params["query"], _over_time(params.get("query_bias")))
    return _normed(params, "query_norm", q_BKGTH, cfg)


def key_value(params: dict, x_BSD: jax.Array, cfg: ModelConfig, places: Places) -> KeyValue:
    """Keys and values [B, K, S, H] of a sequence, and where they stand."""
    k_BKSH = dense("BSD,DKH->BKSH", x_BSD, params["key"], _over_time(params.get("key_bias")))
    v_BKSH = dense("BSD,DKH->BKSH", x_BSD, params["value"], _over_time(params.get("value_bias")))
    return _normed(params, "key_norm", k_BKSH, cfg), v_BKSH, places


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
