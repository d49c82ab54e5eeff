"""One block: self-attention, cross-attention in a decoder that has an encoder, feed-forward, each with residual and norm."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxformer.config import ModelConfig
from jaxformer.config.spec import with_sizes
from jaxformer.nn import attention, mlp, norm
from jaxformer.nn.cache import LayerCache
from jaxformer.nn.dense import child, dropout
from jaxformer.nn.experts import router
from jaxformer.nn.mask import TokenInfo
from jaxformer.nn.named import named, scope


class BlockOutput(NamedTuple):
    """What a block gives."""

    x_BTD: jax.Array
    cache: LayerCache | None
    """The layer's cache, which has seen the tokens; None without one."""
    routing: dict[str, jax.Array] | None
    """Sums over tokens of what its experts did (``router.sums``); None without experts, or where nothing is counted."""


def spec(cfg: ModelConfig, crossing: bool = False) -> dict:
    """Parameters of a block, of which a layer with experts has "moe" in place of "mlp"; ``crossing`` adds cross-attention."""
    branches = ["attention", "mlp"] + ["cross_attention"] * crossing
    parts = {name: attention.spec(cfg) for name in branches if name != "mlp"}
    parts |= {"moe": router.spec(cfg)} if cfg.experts.n_experts else {"mlp": mlp.spec(cfg)}
    names = [f"{name}_norm" for name in branches]
    if cfg.residual == "sandwich":
        names += [f"{name}_out_norm" for name in branches]
    return with_sizes(parts | {name: norm.spec(cfg) for name in names}, cfg.component_sizes)


def has(cfg: ModelConfig, sublayer: str) -> bool:
    """Whether a layer of that config has the part of that name, if any layer does."""
    if sublayer in ("mlp", "moe"):
        return (sublayer == "moe") == (cfg.experts.n_experts > 0)
    return not sublayer.endswith("_out_norm") or cfg.residual == "sandwich"


def component(cfg: ModelConfig, sublayer: str) -> Any:
    """What computes a part of a block; layers in which it differs have parameters of their own trees."""
    return {"attention": cfg.attention, "cross_attention": cfg.attention, "mlp": cfg.mlp}.get(sublayer)


def apply(
    params: dict,
    x_BTD: jax.Array,
    cfg: ModelConfig,
    *,
    info: TokenInfo | None = None,
    position_params: dict | None = None,
    source: tuple[jax.Array, TokenInfo] | None = None,
    cache: LayerCache | None = None,
    rng: jax.Array | None = None,
    counted: Any = None,
    training: bool = False,
) -> BlockOutput:
    """[B, T, D] -> [B, T, D]. source: the encoder's output [B, S, D] and where its tokens stand, for cross-attention (with a
    cache, for the first chunk alone); counted and training: as in ``router.apply``; the other arguments: as in
    ``attention.apply``."""

    def normed(x_BTD, norm_name):
        return norm.apply(params[norm_name], x_BTD, cfg)

    def branch(x_BTD, name, f):
        sublayer = "moe" if name == "mlp" and "moe" in params else name
        with scope(sublayer):
            x_BTD = x_BTD if cfg.residual in ("post", "branch") else normed(x_BTD, f"{name}_norm")
            x_BTD, more = f(params[sublayer], x_BTD, child(rng, name))
            x_BTD = named(x_BTD, "out", "BTD", cfg)
            x_BTD = dropout(x_BTD, cfg.execution.residual_dropout, child(rng, f"{name}.out"))
            out_norms: dict[Any, str] = {"branch": f"{name}_norm", "sandwich": f"{name}_out_norm"}
            out_norm = out_norms.get(cfg.residual)
            return x_BTD if out_norm is None else normed(x_BTD, out_norm), more

    def residual(x_BTD, name, f):
        y_BTD, more = branch(x_BTD, name, f)
        x_BTD = x_BTD + y_BTD
        return norm.apply(params[f"{name}_norm"], x_BTD, cfg) if cfg.residual == "post" else x_BTD, more

    def self_attention(params, x_BTD, rng):
        return attention.apply(params, x_BTD, cfg, info=info, position_params=position_params, cache=cache, rng=rng)

    def feed_forward(params, x_BTD, rng):
        if not cfg.experts.n_experts:
            return mlp.apply(params, x_BTD, cfg), None
        valid = None if info is None else info.valid
        return router.apply(params, x_BTD, cfg, valid=valid, counted=counted, training=training)

    if cfg.residual == "parallel":
        y_BTD, cache = branch(x_BTD, "attention", self_attention)
        sum_BTD = x_BTD + y_BTD
        y_BTD, routing = branch(x_BTD, "mlp", feed_forward)
        return BlockOutput(named(sum_BTD + y_BTD, "out", "BTD", cfg), cache, routing)
    x_BTD, cache = residual(x_BTD, "attention", self_attention)
    if "cross_attention" in params:
        x_BTD, cache = residual(x_BTD, "cross_attention", _cross_attention(cfg, info, source, cache))
    x_BTD, routing = residual(x_BTD, "mlp", feed_forward)
    return BlockOutput(named(x_BTD, "out", "BTD", cfg), cache, routing)


def _cross_attention(cfg, info, source, cache) -> Callable[..., tuple[jax.Array, LayerCache | None]]:
    def apply(params, x_BTD, rng):
        kv = None if source is None else attention.source_key_value(params, source[0], source[1], cfg)
        kept = cache
        if kept is not None:
            kv, kept = kept.with_source(kv)
        y_BTD, _ = attention.apply(params, x_BTD, cfg, info=info, cross_attention_kv=kv, rng=rng)
        return y_BTD, kept

    return apply
