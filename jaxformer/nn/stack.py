"""L blocks with their own parameters each: position on the way in, final norm on the way out, scanned or unrolled.

Parameters are stacked on a leading axis L either way: each part of a block over the layers that have it.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxformer import spec as specs
from jaxformer.config import ModelConfig
from jaxformer.nn import attention, block, norm, position
from jaxformer.nn.dense import child, dropout
from jaxformer.nn.mask import Places, arange
from jaxformer.nn.moe import Routed
from jaxformer.nn.named import listening, named, scope

POLICY = jax.checkpoint_policies


def spec(cfg: ModelConfig, crossing: bool = False) -> dict:
    """Parameters of a stack of ``cfg.n_layers`` blocks."""
    parts = {"layers": {name: specs.stack(own, len(has)) for name, (own, has) in _parts(cfg, crossing).items()}}
    if cfg.residual != "post":  # Post-LN blocks end with a norm already
        parts["norm"] = norm.spec(cfg)
    if own := position.spec(cfg):
        parts["position"] = own
    if cfg.embedding_norm:
        parts["embedding_norm"] = norm.spec(cfg)
    return parts


def _parts(cfg: ModelConfig, crossing: bool) -> dict[str, tuple[dict, list[int]]]:
    """Of each part of a block, its parameters and the numbers of the layers that have it: not all need to."""
    found: dict[str, tuple[dict, list[int]]] = {}
    kinds = {layer: block.spec(layer, crossing) for layer in set(cfg.layers)}
    for number, layer in enumerate(cfg.layers):
        for name, own in kinds[layer].items():
            found.setdefault(name, (own, []))[1].append(number)
    return found


def apply(
    params: dict,
    x_BTD: jax.Array,
    cfg: ModelConfig,
    *,
    places: Places | None = None,
    memory: tuple[jax.Array, Places] | None = None,
    cache=None,
    key: jax.Array | None = None,
    routed: Routed | None = None,
):
    """[B, T, D] -> [B, T, D]; with a cache (``decode.cache``), the pair of that and the cache that has seen it.

    memory: what cross-attention reads, [B, S, D], and where it stands. routed: is told what the layers of experts did.
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
        """``layer``: this layer's config; ``index``: its number, which may be traced. Gives x, and what experts did."""
        own = None if routed is None else Routed(routed.counted, routed.training)

        def source_key_value(cross_params):
            return None if memory is None else attention.source_key_value(cross_params, memory[0], layer, memory[1])

        def read(cross_params):
            return source_key_value(cross_params) if writer is None else writer.remember(source_key_value(cross_params))

        x_BTD = block.apply(
            layer_params,
            x_BTD,
            layer,
            places=places,
            position_params=position_params,
            memory=read if "cross_attention" in layer_params else None,
            extend=None if writer is None else writer.extend,
            key=None if layers_key is None else jax.random.fold_in(layers_key, index),
            routed=own,
        )
        return x_BTD, [] if own is None else own.layers

    if cache is None:
        x_BTD, did = _layers(params["layers"], x_BTD, cfg, run)
    else:
        x_BTD, did, cache = _cached_layers(params["layers"], x_BTD, cfg, run, cache, places)
    if routed is not None:
        routed.layers += did
    if "norm" in params:
        x_BTD = norm.apply(params["norm"], x_BTD, cfg)
    return x_BTD if cache is None else (x_BTD, cache)


def _cached_layers(params, x_BTD, cfg, run, cache, places):
    entries, did = [], []
    for index, layer, layer_params in _numbered(params, cfg):
        writer = cache.writer(index, layer, places)
        with scope(str(index)):
            x_BTD, own = run(layer, index, layer_params, x_BTD, writer)
        entries.append(writer.entry)
        did += own
    return cache.guard(x_BTD), did, cache.replace(layers=tuple(entries))


def _rematerialised(run, cfg):
    keep = (*cfg.save, "attention.mixed", "cross_attention.mixed") if cfg.remat == "dots" else cfg.save
    policy = POLICY.save_only_these_names(*keep) if keep else None
    if cfg.remat == "dots":
        policy = POLICY.save_from_both_policies(POLICY.dots_with_no_batch_dims_saveable, policy)

    # In a scan, nothing could merge what is computed again with what was computed first.
    return jax.checkpoint(run, static_argnums=0, policy=policy, prevent_cse=not cfg.scan)


def _layers(params, x_BTD, cfg, run):
    """``run(layer config, index, layer params, x)`` for every layer; x, and all that experts did."""
    watched, did = listening(), []
    if cfg.remat != "none" and not watched:
        run = _rematerialised(run, cfg)
    if not cfg.scan or watched or is_unstacked(params):
        for index, layer, layer_params in _numbered(params, cfg):
            with scope(str(index)):
                x_BTD, own = run(layer, index, layer_params, x_BTD)
            did += own
        return x_BTD, did
    for start, period, repeats in repetition(cfg.layers):
        stop, layers = start + period * repeats, cfg.layers[start : start + period]
        group = _rows(params, cfg.layers, start, period, repeats)

        def body(x_BTD, group, start=start, layers=layers):
            first, group_params = group
            did = []
            for offset, layer_params in enumerate(unstack(group_params, layers)):
                x_BTD, own = run(layers[offset], first + offset, layer_params, x_BTD)
                did += own
            return x_BTD, did

        x_BTD, own = jax.lax.scan(body, x_BTD, (jnp.arange(start, stop, period), group))
        did += [jax.tree.map(lambda sums: sums[r], one) for r in range(repeats) for one in own]  # noqa: B023
    return x_BTD, did


def _rows(params, layers, start, period, repeats):
    """Of each part, what the ``repeats`` periods of layers from ``start`` on have: [repeats, of a period, ...]."""
    found = {}
    for name, part in params.items():
        first, each = (
            sum(block.has(layer, name) for layer in some) for some in (layers[:start], layers[start : start + period])
        )
        if each:
            cut = lambda p: p[first : first + each * repeats].reshape(repeats, each, *p.shape[1:])  # noqa: B023
            found[name] = jax.tree.map(cut, part)
    return found


def _numbered(params, cfg):
    """``(index, config, parameters)`` of every layer."""
    layers = [params[str(i)] for i in range(cfg.n_layers)] if is_unstacked(params) else unstack(params, cfg.layers)
    return zip(range(cfg.n_layers), cfg.layers, layers, strict=True)


def is_unstacked(params: dict) -> bool:
    """Whether the layers' parameters are one tree a layer, under "0", "1", …"""
    return "0" in params


def unstack(params: dict, layers: Sequence[ModelConfig]) -> list[dict]:
    """One tree a layer from the stacked one. By ``split``, whose gradient is one concatenation: indexing would add up arrays
    of all layers that are zero but for one."""
    trees: list[dict] = [{} for _ in layers]
    for name, part in params.items():
        own = [number for number, layer in enumerate(layers) if block.has(layer, name)]
        leaves, tree = jax.tree.flatten(part)
        split = [jax.lax.split(leaf, [1] * len(own)) for leaf in leaves]
        for row, number in enumerate(own):
            trees[number][name] = jax.tree.unflatten(tree, [jnp.squeeze(parts[row], 0) for parts in split])
    return trees


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
