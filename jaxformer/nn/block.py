"""One block: self-attention, cross-attention in a decoder that has an encoder, feed-forward, each with residual and norm."""

from collections.abc import Callable

import jax

from jaxformer.config import ModelConfig
from jaxformer.nn import attention, mlp, moe, norm
from jaxformer.nn.attend import Entries
from jaxformer.nn.attention import KeyValue
from jaxformer.nn.dense import child, dropout
from jaxformer.nn.mask import Places
from jaxformer.nn.named import named, scope


def spec(cfg: ModelConfig, crossing: bool = False) -> dict:
    """Parameters of a block, of which a layer with experts has "moe" in place of "mlp"; ``crossing`` adds cross-attention."""
    branches = ["attention", "mlp"] + ["cross_attention"] * crossing
    parts = {name: attention.spec(cfg) for name in branches if name != "mlp"}
    parts |= {"moe": moe.spec(cfg)} if cfg.experts.number else {"mlp": mlp.spec(cfg)}
    names = [f"{name}_norm" for name in branches]
    if cfg.residual == "sandwich":
        names += [f"{name}_out_norm" for name in branches]
    return parts | {name: norm.spec(cfg) for name in names}


def has(cfg: ModelConfig, part: str) -> bool:
    """Whether a layer of that config has the part of that name, if any layer does."""
    return part not in ("mlp", "moe") or (part == "moe") == (cfg.experts.number > 0)


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
    routed: moe.Routed | None = None,
) -> jax.Array:
    """[B, T, D] -> [B, T, D]. memory: gives, from the cross-attention's parameters, the keys and values to read; routed: as in
    ``moe.apply``; the other keywords as in ``attention.apply``."""

    def branch(x_BTD, name, f):
        part = "moe" if name == "mlp" and "moe" in params else name

        def normed(x_BTD, norm_name):
            return norm.apply(params[norm_name], x_BTD, cfg)

        with scope(part):
            x_BTD = x_BTD if cfg.residual in ("post", "branch") else normed(x_BTD, f"{name}_norm")
            x_BTD = named(f(params[part], x_BTD, child(key, name)), "out", "BTD", cfg)
            x_BTD = dropout(x_BTD, cfg.residual_dropout, child(key, f"{name}.out"))
            out_norm = {"branch": f"{name}_norm", "sandwich": f"{name}_out_norm"}.get(cfg.residual)
            return x_BTD if out_norm is None else normed(x_BTD, out_norm)

    def residual(x_BTD, name, f):
        x_BTD = x_BTD + branch(x_BTD, name, f)
        return norm.apply(params[f"{name}_norm"], x_BTD, cfg) if cfg.residual == "post" else x_BTD

    def self_attention(params, x_BTD, key):
        where = {"places": places, "position_params": position_params, "extend": extend}
        return attention.apply(params, x_BTD, cfg, **where, key=key)

    def feed_forward(params, x_BTD, key):
        if cfg.experts.number:
            return moe.apply(params, x_BTD, cfg, valid=None if places is None else places.valid, routed=routed)
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
