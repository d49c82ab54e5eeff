"""Parameters from their declaration: initial values by path, shapes, decay, counts, differences."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxformer as jf
from jaxformer.config import spec as specs
from jaxformer.nn import model

pytestmark = pytest.mark.usefixtures("quick_compilation")
CFG = tiny.PRESETS["llama_gqa"]
FULL_SIZE = {
    name: getattr(jf.presets, name)() for name in ("transformer_base", "gpt2_xl", "llama3_8b", "qwen3_0_6b", "mistral_7b")
}


@functools.cache
def init(cfg, seed=0):
    return {path: np.asarray(leaf) for path, leaf in specs.walk(jf.init(cfg, jax.random.key(seed)))}


# Randomness by path


def test_adding_or_removing_tensors_changes_no_other():
    other = dataclasses.replace(CFG, qkv_bias=True, qk_norm=True, mlp_bias=True, norm="layer", tied_head=True)
    before, after = init(CFG), init(other)
    assert len(after.keys() - before.keys()) > 10 and before.keys() - after.keys() == {"head.kernel"}
    for path in before.keys() & after.keys():
        np.testing.assert_array_equal(before[path], after[path], err_msg=path)


def test_adding_a_layer_changes_no_other_layer():
    three, four = init(CFG), init(dataclasses.replace(CFG, n_layers=4))
    for path, leaf in four.items():
        expected = three[path]
        np.testing.assert_array_equal(leaf[:3] if path.startswith("decoder.layers.") else leaf, expected, err_msg=path)


def test_adding_an_encoder_changes_nothing_of_the_decoder():
    alone, both = (init(dataclasses.replace(CFG, encoder_layers=layers)) for layers in (0, 2))
    assert {path.split(".")[0] for path in both.keys() - alone.keys()} == {"encoder", "decoder"}
    for path, leaf in alone.items():
        np.testing.assert_array_equal(leaf, both[path], err_msg=path)
        if path.startswith("decoder.layers.") and not path.endswith("gain"):
            assert not np.array_equal(leaf[:2], both[path.replace("decoder", "encoder")])


def test_every_tensor_layer_and_seed_has_its_own_values():
    first, second = init(CFG), init(CFG, seed=1)
    random = {path for path in first if not path.endswith("gain")}
    assert all(not np.array_equal(first[path], second[path]) for path in random)
    layers = [leaf for path, leaf in first.items() if path.startswith("decoder.layers.") and path in random]
    matrices = [layer.ravel()[:500] for leaf in layers for layer in leaf]
    assert len(matrices) == 7 * 3
    correlation = np.corrcoef(np.stack(matrices)) - np.eye(len(matrices))
    assert np.abs(correlation).max() < 6 / math.sqrt(500)  # 210 pairs of 500 independent values: six standard deviations


# Standard deviations

WIDE = {"vocab_size": 512, "d_model": 128, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "d_ff": 192}
FANS = {  # (inputs, outputs) of a layer's tensor; N·H is 256, K·H is 128
    "attention.query": (128, 256),
    "attention.key": (128, 128),
    "attention.out": (256, 128),
    "mlp.up": (128, 192),
    "mlp.down": (192, 128),
    "head.kernel": (128, 512),
}
STD = {
    "fan_in": lambda inputs, outputs: inputs**-0.5,
    "xavier": lambda inputs, outputs: (2 / (inputs + outputs)) ** 0.5,
    "normal": lambda inputs, outputs: 0.05,
}


def assert_std(leaf, expected):
    # the estimate from n values is off by about 1 / sqrt(2 n) of itself: five times that
    assert abs(leaf.std() / expected - 1) < 5 / math.sqrt(2 * leaf.size)
    assert abs(leaf.mean()) < 5 * expected / math.sqrt(leaf.size)


@pytest.mark.parametrize(("kind", "scaled"), [("fan_in", False), ("fan_in", True), ("xavier", False), ("normal", True)])
def test_initial_standard_deviations(kind, scaled):
    cfg = jf.presets.llama(**WIDE, init=kind, init_std=0.05, scale_residual_init=scaled)
    params = init(cfg)
    for path, leaf in params.items():
        name = path.removeprefix("decoder.layers.")
        if name not in FANS:
            continue
        expected = STD[kind](*FANS[name]) / (2 if scaled and name in ("attention.out", "mlp.down") else 1)  # sqrt(2·2 layers)
        assert_std(leaf, expected)
        if kind == "xavier":
            assert np.abs(leaf).max() <= expected * 3**0.5
        else:
            assert np.abs(leaf).max() > 3 * expected
    assert_std(params["embedding.token"], 0.05)


def test_initial_embedding_bias_gain_and_table():
    params = init(jf.presets.transformer_base(**WIDE | {"n_kv_heads": 4}))
    assert_std(params["embedding.token"], 128**-0.5)
    assert all((leaf == 0).all() for path, leaf in params.items() if path.endswith("bias"))
    assert all((leaf == 1).all() for path, leaf in params.items() if path.endswith("gain"))
    assert_std(init(jf.presets.gpt2(**WIDE, max_length=256))["decoder.position.table"], 0.02)


# Shapes, dtypes, masks, counts


@pytest.mark.parametrize("name", [*tiny.PRESETS, *FULL_SIZE])
def test_abstract_is_what_init_gives(name):
    cfg = (tiny.PRESETS | FULL_SIZE)[name]
    expected = jax.eval_shape(lambda: jf.init(cfg, jax.random.key(0)))
    found = specs.abstract(model.spec(cfg), cfg)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    assert all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)
    assert specs.count(model.spec(cfg), cfg) == sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(expected))
    specs.check(expected, model.spec(cfg), cfg)


def test_trees_agree_where_a_component_has_no_parameters():
    cfg = dataclasses.replace(CFG, norm="example_components:PlainNorm")
    tree = model.spec(cfg)
    initial = jax.eval_shape(lambda: jf.init(cfg, jax.random.key(0)))
    structures = {jax.tree.structure(t) for t in (initial, specs.abstract(tree, cfg), specs.decay_mask(tree))}
    assert len(structures) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_param_dtype(dtype):
    cfg = dataclasses.replace(CFG, param_dtype=dtype, norm="layer", qkv_bias=True)
    expected = {jnp.dtype(dtype)}
    assert {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(lambda: jf.init(cfg, jax.random.key(0))))} == expected
    assert {leaf.dtype for leaf in jax.tree.leaves(specs.abstract(model.spec(cfg), cfg))} == expected


@pytest.mark.parametrize("name", tiny.PRESETS)
def test_decay_goes_to_all_but_norms_and_biases(name):
    mask = dict(specs.walk(specs.decay_mask(model.spec(tiny.PRESETS[name]))))
    assert mask == {path: not re.search(r"(bias|gain)$", path) for path in mask}
    assert {True, False} == set(mask.values())


# Differences and errors


def test_check_names_all_that_differs():
    tree = model.spec(CFG)
    params = specs.abstract(tree, CFG)
    specs.check(params, tree, CFG)
    del params["head"]
    params["decoder"]["extra"] = {"gain": jnp.ones(3)}
    params["embedding"]["token"] = jnp.ones((67, 31))
    with pytest.raises(ValueError) as raised:
        specs.check(params, tree, CFG)
    assert str(raised.value).splitlines() == [
        "parameters do not fit the config:",
        "  missing     head.kernel  [32, 67]",
        "  unexpected  decoder.extra.gain  [3]",
        "  differs     embedding.token  expected [67, 32], found [67, 31]",
    ]


def test_sizes_of_letters():
    own = jf.Param("DF", specs.zeros, sizes=(("F", 64),))
    assert own.shape(CFG) == (32, 64)
    assert jf.Param("DF", specs.zeros).shape(CFG) == (32, 48)
    with pytest.raises(ValueError, match=r"Param\('DX'\): the size of dimension 'X' is not known"):
        jf.Param("DX", specs.zeros).shape(CFG)
    stacked = specs.stack({"a": {"b": own}}, 5)["a"]["b"]
    assert stacked.dims == "LDF" and stacked.shape(CFG) == (5, 32, 64)
