"""The forward is a function: it changes nothing that it is given, and its program is the same whenever it is traced."""

import dataclasses
import re

import jax
import numpy as np
import pytest
import tiny
from example_components import MovingAverage

import jaxformer as jf
from jaxformer.nn.mask import TokenInfo

pytestmark = pytest.mark.usefixtures("quick_compilation")
CONFIGS = {name: tiny.PRESETS[name] for name in ("transformer_base", "mistral", "deepseek")}
CONFIGS["hybrid"] = dataclasses.replace(tiny.PRESETS["llama_gqa"], n_layers=2, attention=("grouped", MovingAverage(0.5)))


def copied(tree):
    """Its structure, its leaves, and their values now."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, leaves, [np.array(leaf) for leaf in leaves]


def assert_unchanged(tree, before):
    structure, leaves, values = before
    assert jax.tree.structure(tree) == structure
    for leaf, old, value in zip(jax.tree.leaves(tree), leaves, values, strict=True):
        assert leaf is old, "the same array"
        np.testing.assert_array_equal(leaf, value)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_forward_changes_neither_parameters_nor_cache(name):
    cfg = CONFIGS[name]
    if name != "hybrid":  # one layer shows it, and what is not compiled is slow
        cfg = dataclasses.replace(cfg, n_layers=1, encoder_layers=min(cfg.encoder_layers, 1))
    params, ids, given = tiny.drawn(cfg), tiny.tokens(cfg, 2, 5), tiny.inputs(cfg)
    empty = jf.init_cache(cfg, 2, 8)
    given_before, empty_before, params_before = copied(given), copied(empty), copied(params)
    first, cache = jf.forward_cached(params, ids, cfg, empty, **given)  # not compiled: nothing stands between
    assert_unchanged(empty, empty_before)
    cache_before = copied(cache)
    second, after = jf.forward_cached(params, ids[:, :2], cfg, cache)
    assert_unchanged(cache, cache_before)
    assert after.used.tolist() == [7, 7] and cache.used.tolist() == [5, 5] and empty.used.tolist() == [0, 0]
    for layer, (old, new) in enumerate(zip(cache.layers, after.layers, strict=True)):
        written = [entry for entry in old if not entry.startswith("source")]
        assert written and not any(np.array_equal(old[entry], new[entry]) for entry in written), layer
    equal(jf.forward_cached(params, ids, cfg, empty, **given), (first, cache))
    equal(jf.forward_cached(params, ids[:, :2], cfg, cache), (second, after))
    assert_unchanged(params, params_before)
    assert_unchanged(given, given_before)


def test_the_methods_of_a_cache_change_nothing():
    cfg = dataclasses.replace(tiny.PRESETS["llama_gqa"], n_layers=1)
    cache = jf.init_cache(cfg, 2, 8)
    before = copied(cache)
    info, counted = cache.advance((2, 3), cfg, None, None)
    assert isinstance(info, TokenInfo) and counted.used.tolist() == [3, 3]
    layer = counted.layer(0, cfg.layers[0], info)
    entries, layer_before = dict(layer.entries), copied(layer)
    ones = np.ones((2, 2, 3, 8), np.float32)
    kept, _, extended = layer.extend({"key": ones, "value": ones})
    assert float(kept["key"].sum()) == ones.sum() == float(extended.entries["key"].sum())
    assert layer.entries == entries and extended.entries.keys() == entries.keys()
    assert_unchanged(layer, layer_before)
    source = (ones, ones, info)
    (_, _, read), crossed = layer.with_source(source)
    assert "source_key" in crossed.entries and "source_key" not in layer.entries and read.order.shape == (2, 3)
    counted.rewind(np.array([1, 2])), counted.take(np.array([1, 0]))
    assert counted.used.tolist() == [3, 3]
    assert_unchanged(cache, before)
    for record in (cache, layer):
        with pytest.raises(dataclasses.FrozenInstanceError):
            record.used = counted.used


def text(f, *args):
    """The program of ``f``; the text names functions by their addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(jax.make_jaxpr(f)(*args)))


@pytest.mark.parametrize("fields", [{}, {"scan": True, "remat": "full", "remat_save": ("mlp.up",)}], ids=["plain", "scanned"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_program_is_the_same_whenever_it_is_traced(name, fields):
    fields = fields if name not in ("deepseek", "hybrid") else {k: v for k, v in fields.items() if k != "remat_save"}
    cfg = dataclasses.replace(CONFIGS[name], **fields)
    params, ids, given = jf.spec.abstract(jf.model.spec(cfg), cfg), tiny.tokens(cfg), tiny.inputs(cfg)
    batch, cache = tiny.batch(cfg), jf.init_cache(cfg, 2, 12)
    programs = {
        "forward": lambda: text(lambda p: jf.forward(p, ids, cfg, **given), params),
        "dropout": lambda: text(lambda p: jf.forward(p, ids, tiny.with_dropout(cfg), key=jax.random.key(0), **given), params),
        "cached": lambda: text(lambda p, c: jf.forward_cached(p, ids, cfg, c, **given), params, cache),
        "counted": lambda: text(lambda p: jf.apply(p, ids, cfg, counted=True, training=True, **given).routing, params),
        "loss": lambda: text(jax.grad(lambda p: jf.loss(p, batch, cfg)[0]), params),
    }
    first = {what: trace() for what, trace in programs.items()}
    assert len(set(first.values())) == len(first), "they differ from each other"
    jax.clear_caches()
    for what in reversed(programs):  # in another order, after all that has been traced before
        assert programs[what]() == first[what], what
