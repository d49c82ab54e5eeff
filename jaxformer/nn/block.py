"""One block: self-attention, cross-attention in a decoder that has an encoder, feed-forward, each with residual and norm."""

from collections.abc import Callable

import jax

from jaxformer.config import ModelConfig
from jaxformer.nn import attention, mlp, norm
from jaxformer.nn.attention import Entries, KeyValue
from jaxformer.nn.dense import child, dropout
from jaxformer.nn.mask import Places
from jaxformer.nn.named import named, scope


def spec(cfg: ModelConfig, crossing: bool = False) -> dict:
    """Parameters of a block; ``crossing`` adds cross-attention."""
    parts = {"attention": attention.spec(cfg), "mlp": mlp.spec(cfg)}
    if crossing:
        parts["cross_attention"] = attention.spec(cfg)
    names = [f"{name}_norm" for name in parts]
    if cfg.residual == "sandwich":
        names += [f"{name}_out_norm" for name in parts]
    return parts | {name: norm.spec(cfg) for name in names}


def apply(
    params: dict,
    x_BTD: jax.Array,
    cfg: ModelConfig,
    *,
    places: Places | None = None,
    position_params: dict | None = None,
    memory: Callable[[dict], KeyValue | None] | None = None,
    extend: Callable[[Entries], tuple[Entries, Places]] | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """[B, T, D] -> [B, T, D]. memory: gives, from the cross-attention's parameters, the keys and values to read; the other
    keywords as in ``attention.apply``."""

    def branch(x_BTD, name, f):
        def normed(x_BTD, norm_name):
            return norm.apply(params[norm_name], x_BTD, cfg)

        with scope(name):
            x_BTD = x_BTD if cfg.residual in ("post", "branch") else normed(x_BTD, f"{name}_norm")
            x_BTD = dropout(f(params[name], x_BTD, child(key, name)), cfg.residual_dropout, child(key, f"{name}.out"))
            out_norm = {"branch": f"{name}_norm", "sandwich": f"{name}_out_norm"}.get(cfg.residual)
            return x_BTD if out_norm is None else normed(x_BTD, out_norm)

    def residual(x_BTD, name, f):
        x_BTD = x_BTD + branch(x_BTD, name, f)
        return norm.apply(params[f"{name}_norm"], x_BTD, cfg) if cfg.residual == "post" else x_BTD

    def self_attention(params, x_BTD, key):
        where = {"places": places, "position_params": position_params, "extend": extend}
        return attention.apply(params, x_BTD, cfg, **where, key=key)

    def feed_forward(params, x_BTD, key):
        return mlp.apply(params, x_BTD, cfg)

    if cfg.residual == "parallel":
        x_BTD = x_BTD + branch(x_BTD, "attention", self_attention) + branch(x_BTD, "mlp", feed_forward)
        return named(x_BTD, "out", "BTD", cfg)
    x_BTD = residual(x_BTD, "attention", self_attention)
    if memory is not None:
        read = memory

        def cross_attention(params, x_BTD, key):
            return attention.apply(params, x_BTD, cfg, places=places, memory=read(params), key=key)

        x_BTD = residual(x_BTD, "cross_attention", cross_attention)
    x_BTD = residual(x_BTD, "mlp", feed_forward)
    return named(x_BTD, "out", "BTD", cfg)
