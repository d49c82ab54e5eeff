"""L blocks with their own parameters each: position on the way in, final norm on the way out, scanned or unrolled.

Parameters are stacked on a leading axis L either way.
"""

import jax
import jax.numpy as jnp

from jaxformer import spec as specs
from jaxformer.config import ModelConfig
from jaxformer.nn import attention, block, norm, position
from jaxformer.nn.dense import child, dropout
from jaxformer.nn.mask import Places, arange
from jaxformer.nn.named import listening, named, scope

REMAT = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}


def spec(cfg: ModelConfig, crossing: bool = False) -> dict:
    """Parameters of a stack of ``cfg.n_layers`` blocks."""
    parts = {"layers": specs.stack(block.spec(cfg, crossing), cfg.n_layers)}
    if cfg.residual != "post":  # Post-LN blocks end with a norm already
        parts["norm"] = norm.spec(cfg)
    if own := position.spec(cfg):
        parts["position"] = own
    if cfg.embedding_norm:
        parts["embedding_norm"] = norm.spec(cfg)
    return parts


def apply(
    params: dict,
    x_BTD: jax.Array,
    cfg: ModelConfig,
    *,
    places: Places | None = None,
    memory: tuple[jax.Array, Places] | None = None,
    cache=None,
    key: jax.Array | None = None,
):
    """[B, T, D] -> [B, T, D]; with a cache (``decode.cache``), the pair of that and the cache that has seen it.

    memory: what cross-attention reads, [B, S, D], and where it stands.
    """
    places = arange(x_BTD.shape[1]) if places is None else places
    position_params = params.get("position", {})
    if position.site(cfg) == "input":
        x_BTD = position.apply(position_params, x_BTD, places.position, cfg)
    if cfg.embedding_norm:
        x_BTD = norm.apply(params["embedding_norm"], x_BTD, cfg)
    x_BTD = dropout(x_BTD, cfg.embedding_dropout, child(key, "embedding"))
    x_BTD = named(x_BTD, "in", "BTD", cfg)
    layers_key = child(key, "layers")

    def run(layer, index, layer_params, x_BTD, writer=None):
        """``layer``: this layer's config; ``index``: its number, which may be traced."""

        def source_key_value(cross_params):
            return None if memory is None else attention.source_key_value(cross_params, memory[0], layer, memory[1])

        def read(cross_params):
            return source_key_value(cross_params) if writer is None else writer.remember(source_key_value(cross_params))

        return block.apply(
            layer_params,
            x_BTD,
            layer,
            places=places,
            position_params=position_params,
            memory=read if "cross_attention" in layer_params else None,
            extend=None if writer is None else writer.extend,
            key=None if layers_key is None else jax.random.fold_in(layers_key, index),
        )

    if cache is None:
        x_BTD = _layers(params["layers"], x_BTD, cfg, run)
    else:
        x_BTD, cache = _cached_layers(params["layers"], x_BTD, cfg, run, cache, places)
    if "norm" in params:
        x_BTD = norm.apply(params["norm"], x_BTD, cfg)
    return x_BTD if cache is None else (x_BTD, cache)


def _cached_layers(params, x_BTD, cfg, run, cache, places):
    entries = []
    for index, layer, layer_params in _numbered(params, cfg):
        writer = cache.writer(index, layer, places)
        with scope(str(index)):
            x_BTD = run(layer, index, layer_params, x_BTD, writer)
        entries.append(writer.entry)
    return cache.guard(x_BTD), cache.replace(layers=tuple(entries))


def _layers(params, x_BTD, cfg, run):
    """``run(layer config, index, layer params, x)`` for every layer."""
    watched = listening()
    if cfg.remat != "none" and not watched:
        run = jax.checkpoint(run, static_argnums=0, policy=REMAT[cfg.remat])
    if not cfg.scan or watched or is_unstacked(params):
        for index, layer, layer_params in _numbered(params, cfg):
            with scope(str(index)):
                x_BTD = run(layer, index, layer_params, x_BTD)
        return x_BTD
    for start, period, repeats in repetition(cfg.layers):
        stop = start + period * repeats
        group = jax.tree.map(lambda p: p[start:stop].reshape(repeats, period, *p.shape[1:]), params)  # noqa: B023

        def body(x_BTD, group, start=start, period=period):
            first, group_params = group
            for offset, layer_params in enumerate(unstack(group_params, period)):
                x_BTD = run(cfg.layers[start + offset], first + offset, layer_params, x_BTD)
            return x_BTD, None

        x_BTD, _ = jax.lax.scan(body, x_BTD, (jnp.arange(start, stop, period), group))
    return x_BTD


def _numbered(params, cfg):
    """``(index, config, parameters)`` of every layer."""
    layers = [params[str(i)] for i in range(cfg.n_layers)] if is_unstacked(params) else unstack(params, cfg.n_layers)
    return zip(range(cfg.n_layers), cfg.layers, layers, strict=True)


def is_unstacked(params: dict) -> bool:
    """Whether the layers' parameters are one tree a layer, under "0", "1", …"""
    return "0" in params


def unstack(params: dict, layers: int) -> list[dict]:
    """One tree a layer from the stacked one. By ``split``, whose gradient is one concatenation: indexing would add up
    ``layers`` arrays that are zero but for one layer."""
    leaves, tree = jax.tree.flatten(params)
    split = [jax.lax.split(leaf, [1] * layers) for leaf in leaves]
    return [jax.tree.unflatten(tree, [jnp.squeeze(parts[index], 0) for parts in split]) for index in range(layers)]


def repetition(kinds: tuple) -> list[tuple[int, int, int]]:
    """``kinds`` as runs ``(start, period, repeats)`` that cover it in order, so that one scan does each run. Prefers long
    runs, then short periods: a a a a -> one run; a b a b -> one run of period 2; a a b b -> two runs."""
    runs, start = [], 0
    while start < len(kinds):
        best = (1, 1)
        for period in range(1, (len(kinds) - start) // 2 + 1):
            repeats = 1
            while kinds[start + repeats * period : start + (repeats + 1) * period] == kinds[start : start + period]:
                repeats += 1
            if repeats > 1 and period * repeats > best[0] * best[1]:
                best = (period, repeats)
        runs.append((start, *best))
        start += best[0] * best[1]
    return runs
