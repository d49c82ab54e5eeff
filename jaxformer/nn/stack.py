"""L blocks with their own parameters each: position on the way in, final norm on the way out, scanned or unrolled.

Parameters are stacked on a leading axis L either way: each part of a block over the layers that have it. Where layers differ in
the component of a part, those with the second component in order of appearance have it under the part's name and ``_2``, and
so on.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.config import spec as specs
from jaxformer.nn import block, norm, position
from jaxformer.nn.cache import Cache
from jaxformer.nn.dense import child, dropout
from jaxformer.nn.mask import TokenInfo, arange
from jaxformer.nn.named import listening, named, scope

POLICY = jax.checkpoint_policies


class StackOutput(NamedTuple):
    """What a stack gives."""

    x_BTD: jax.Array
    cache: Cache | None
    """The cache, which has seen the tokens; None without one."""
    routing: tuple[dict[str, jax.Array], ...]
    """Of each layer with experts, sums over the counted tokens (``experts.router.sums``)."""


def spec(cfg: ModelConfig, crossing: bool = False) -> dict:
    """Parameters of a stack of ``cfg.n_layers`` blocks."""
    parts = {"layers": {name: specs.stack(tree, count) for name, (tree, count) in _sublayers(cfg, crossing).items()}}
    if cfg.layers[-1].residual != "post":  # Post-LN blocks end with a norm already
        parts["norm"] = norm.spec(cfg)
    if params := position.stack_spec(cfg):
        parts["position"] = params
    if cfg.embedding_norm:
        parts["embedding_norm"] = norm.spec(cfg)
    return parts


def _sublayers(cfg: ModelConfig, crossing: bool) -> dict[str, tuple[dict, int]]:
    """Parameters of each part of a block, by the name it is stacked under, and in how many layers they are."""
    parts: dict[str, tuple[dict, int]] = {}
    for layer, number in (kinds := Counter(cfg.layers)).items():
        for sublayer, tree in block.spec(layer, crossing).items():
            name = _stacked_name(tuple(kinds), layer, sublayer)
            tree, count = parts.get(name, (tree, 0))
            parts[name] = tree, count + number
    return parts


def _stacked_name(layers: Sequence[ModelConfig], layer: ModelConfig, sublayer: str) -> str:
    """The name that a layer's part is stacked under."""
    components = dict.fromkeys(block.component(other, sublayer) for other in layers if block.has(other, sublayer))
    number = list(components).index(block.component(layer, sublayer)) + 1
    return sublayer if number == 1 else f"{sublayer}_{number}"


def holds(layers: Sequence[ModelConfig], layer: ModelConfig, name: str) -> bool:
    """Whether a layer's parameters are among those stacked under ``name``."""
    sublayer = _sublayer(name)
    return block.has(layer, sublayer) and _stacked_name(layers, layer, sublayer) == name


def _sublayer(name: str) -> str:
    """The sublayer whose parameters are stacked under ``name``."""
    return re.sub(r"_\d+$", "", name)


def apply(
    params: dict,
    x_BTD: jax.Array,
    cfg: ModelConfig,
    *,
    info: TokenInfo | None = None,
    source: tuple[jax.Array, TokenInfo] | None = None,
    cache: Cache | None = None,
    rng: jax.Array | None = None,
    counted: Any = None,
    training: bool = False,
) -> StackOutput:
    """[B, T, D] -> [B, T, D]. info: where the tokens stand. source, counted, training: as in ``block.apply``. cache: what every
    layer has kept of the tokens before. rng: turns dropout on."""
    info = arange(x_BTD.shape[1]) if info is None else info
    position_params = params.get("position", {})
    x_BTD = position.on_input(position_params, x_BTD, info.position, cfg)
    if cfg.embedding_norm:
        x_BTD = norm.apply(params["embedding_norm"], x_BTD, cfg)
    x_BTD = dropout(x_BTD, cfg.execution.embedding_dropout, child(rng, "embedding"))
    x_BTD = named(x_BTD, "in", "BTD", cfg)
    layers_rng = child(rng, "layers")

    def run(layer, index, layer_params, x_BTD, layer_cache=None):
        """``layer``: this layer's config; ``index``: its number, which may be traced."""
        return block.apply(
            layer_params,
            x_BTD,
            layer,
            info=info,
            position_params=position_params,
            source=source,
            cache=layer_cache,
            rng=None if layers_rng is None else jax.random.fold_in(layers_rng, index),
            counted=counted,
            training=training,
        )

    if cache is None:
        x_BTD, routing = _layers(params["layers"], x_BTD, cfg, run)
    else:
        x_BTD, routing, cache = _cached_layers(params["layers"], x_BTD, cfg, run, cache, info)
    if "norm" in params:
        x_BTD = norm.apply(params["norm"], x_BTD, cfg)
    return StackOutput(x_BTD, cache, tuple(sums for sums in routing if sums is not None))


def _cached_layers(params, x_BTD, cfg, run, cache, info):
    entries, routing = [], []
    for index, layer, layer_params in _numbered(params, cfg):
        with scope(str(index)):
            x_BTD, layer_cache, sums = run(layer, index, layer_params, x_BTD, cache.layer(index, layer, info))
        if layer_cache is None:
            raise ValueError(
                f"attention={layer.attention!r} must give (x, cache), with the cache that it was given or its next"
            )
        entries.append(layer_cache.entries)
        routing.append(sums)
    return cache.guard(x_BTD), routing, dataclasses.replace(cache, layers=tuple(entries))


def _rematerialised(run, cfg, scanned):
    execution = cfg.execution
    keep = execution.remat_save
    if execution.remat == "dots":
        keep = (*keep, "attention.mixed", "cross_attention.mixed")
    policy = POLICY.save_only_these_names(*keep) if keep else None
    if execution.remat == "dots":
        policy = POLICY.save_from_both_policies(POLICY.dots_with_no_batch_dims_saveable, policy)

    # In a scan, nothing could merge what is computed again with what was computed first.
    return jax.checkpoint(run, static_argnums=0, policy=policy, prevent_cse=not scanned)


def _layers(params, x_BTD, cfg, run):
    """x after ``run(layer config, index, layer params, x)`` of every layer, and the sums of their experts."""
    watched, routing = listening(), []
    scanned = cfg.execution.scan and not watched and not is_unstacked(params)
    if cfg.execution.remat != "none" and not watched:
        run = _rematerialised(run, cfg, scanned)
    if not scanned:
        for index, layer, layer_params in _numbered(params, cfg):
            with scope(str(index)):
                x_BTD, _, sums = run(layer, index, layer_params, x_BTD)
            routing.append(sums)
        return x_BTD, routing
    for start, period, repeats in repetition(cfg.layers):
        stop, layers = start + period * repeats, cfg.layers[start : start + period]
        group = _rows(params, cfg.layers, start, period, repeats)

        def body(x_BTD, group, start=start, layers=layers):
            first, group_params = group
            sums_of_period = []
            for offset, layer_params in enumerate(unstack(group_params, cfg.layers, layers)):
                x_BTD, _, sums = run(layers[offset], first + offset, layer_params, x_BTD)
                sums_of_period.append(sums)
            return x_BTD, sums_of_period

        x_BTD, stacked = jax.lax.scan(body, x_BTD, (jnp.arange(start, stop, period), group))
        routing += [jax.tree.map(lambda x: x[r], sums) for r in range(repeats) for sums in stacked]  # noqa: B023
    return x_BTD, routing


def _rows(params, layers, start, period, repeats):
    """Of each part, the parameters of the ``repeats`` periods of layers from ``start`` on: [repeats, of a period, ...]."""
    rows = {}
    for name, tree in params.items():
        first, each = (
            sum(holds(layers, layer, name) for layer in some) for some in (layers[:start], layers[start : start + period])
        )
        if each:
            cut = lambda p: p[first : first + each * repeats].reshape(repeats, each, *p.shape[1:])  # noqa: B023
            rows[name] = jax.tree.map(cut, tree)
    return rows


def _numbered(params, cfg):
    """``(index, config, parameters)`` of every layer."""
    layers = [params[str(i)] for i in range(cfg.n_layers)] if is_unstacked(params) else unstack(params, cfg.layers)
    return zip(range(cfg.n_layers), cfg.layers, layers, strict=True)


def is_unstacked(params: dict) -> bool:
    """Whether the layers' parameters are one tree per layer, under "0", "1", …"""
    return "0" in params


def unstack(params: dict, layers: Sequence[ModelConfig], period: Sequence[ModelConfig] | None = None) -> list[dict]:
    """One tree per layer from the stacked one of the stack's ``layers``, or of those of its ``period`` alone. By ``split``,
    whose gradient is one concatenation: indexing would add up arrays of all layers that are zero but for one."""
    period = layers if period is None else period
    trees: list[dict] = [{} for _ in period]
    for name, stacked in params.items():
        holders = [number for number, layer in enumerate(period) if holds(layers, layer, name)]
        leaves, tree = jax.tree.flatten(stacked)
        split = [jax.lax.split(leaf, [1] * len(holders)) for leaf in leaves]
        for row, number in enumerate(holders):
            layer_tree = jax.tree.unflatten(tree, [jnp.squeeze(pieces[row], 0) for pieces in split])
            trees[number][_sublayer(name)] = layer_tree
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
