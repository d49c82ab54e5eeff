"""One stack, run in several ways: scanned or unrolled, rematerialised or not, compiled or not."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
import tiny

import jaxformer as jf
from jaxformer.nn.stack import repetition

pytestmark = pytest.mark.usefixtures("quick_compilation")
# float32 sums that the compiler fuses in another way; values have size 1, most gradients 0.01 to 1
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


@pytest.mark.parametrize(
    ("kinds", "runs"),
    [
        ("", []),
        ("a", [(0, 1, 1)]),
        ("aaaa", [(0, 1, 4)]),
        ("abab", [(0, 2, 2)]),
        ("aabb", [(0, 1, 2), (2, 1, 2)]),
        ("aaab", [(0, 1, 3), (3, 1, 1)]),
        ("baaa", [(0, 1, 1), (1, 1, 3)]),
        ("aabaab", [(0, 3, 2)]),
        ("aaaaabaaaaab", [(0, 6, 2)]),
        ("ababa", [(0, 2, 2), (4, 1, 1)]),
        ("abc", [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
    ],
)
def test_repetition(kinds, runs):
    assert repetition(tuple(kinds)) == runs


def test_repetition_covers_any_sequence_in_order():
    for kinds in itertools.chain.from_iterable(itertools.product("ab", repeat=n) for n in range(9)):
        covered = []
        for start, period, repeats in repetition(kinds):
            assert start == len(covered)
            covered += kinds[start : start + period] * repeats
        assert tuple(covered) == kinds


def shallow(name, **fields):
    cfg = tiny.PRESETS[name]
    layers = len(cfg.window) if isinstance(cfg.window, tuple) else 2
    return dataclasses.replace(cfg, n_layers=layers, encoder_layers=min(2, cfg.encoder_layers), **fields)


def loss(cfg):
    batch = tiny.batch(cfg, rows=2, length=5)
    return lambda params: jf.loss(params, batch, cfg)[0]


@functools.cache
def value_and_grad(cfg):
    return jax.jit(jax.value_and_grad(loss(cfg)))(tiny.drawn(cfg))


def program(cfg):
    return str(jax.make_jaxpr(loss(cfg))(tiny.drawn(cfg)))


def assert_same(found, expected):
    for path, leaf in jax.tree.leaves_with_path(expected):  # softmax ignores a key's bias unless RoPE turns it
        assert "key_bias" in jax.tree_util.keystr(path) or np.abs(leaf).max() > 1e-3, path
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), found, expected)


@pytest.mark.parametrize("name", ["transformer_base", "gpt2", "qwen3", "mixed_windows"])
def test_scanned_is_unrolled(name):
    assert "scan[" in program(shallow(name, scan=True)) and "scan[" not in program(shallow(name))
    assert_same(value_and_grad(shallow(name, scan=True)), value_and_grad(shallow(name)))


@pytest.mark.parametrize(("remat", "scan"), [("dots", False), ("full", True)])
def test_rematerialising_changes_no_value_and_no_gradient(remat, scan):
    cfg = shallow("qwen3", remat=remat, scan=scan)
    assert "remat" in program(cfg) and "remat" not in program(shallow("qwen3"))
    assert_same(value_and_grad(cfg), value_and_grad(shallow("qwen3")))


def test_rematerialising_keeps_less_for_the_backward_pass():
    assert kept(remat="none") > kept(remat="dots") > kept(remat="full")


def arrays(**fields):
    """What the backward pass is given."""
    cfg = shallow("gpt2", **fields)
    _, back = jax.eval_shape(lambda p: jax.vjp(loss(cfg), p), tiny.drawn(cfg))
    return jax.tree.leaves(back)


def kept(**fields):
    return sum(x.size * x.dtype.itemsize for x in arrays(**fields))


def test_named_activations_are_kept():
    given = {"remat": "full", "scan": True}
    before, after = ({x.shape for x in arrays(**given, remat_save=names)} for names in ((), ("mlp.up", "attention.query")))
    cfg, rows, length = shallow("gpt2"), 2, 5
    heads = (rows, cfg.n_kv_heads, 1, length, cfg.head_dim)
    assert after - before == {(cfg.n_layers, rows, length, cfg.d_ff), (cfg.n_layers, *heads)}
    assert_same(value_and_grad(shallow("qwen3", **given, remat_save=("attention.mixed",))), value_and_grad(shallow("qwen3")))


def test_a_name_that_no_layer_gives_is_refused():
    pairs = {"remat": "full", "remat_save": ("cross_attention.mixed",)}  # which the encoder's layers have not
    assert jax.eval_shape(jax.grad(loss(shallow("transformer_base", **pairs))), tiny.drawn(shallow("transformer_base")))
    with pytest.raises(ValueError, match="remat_save='mlp.ups' names no activation of a layer.*did you mean 'mlp.up'"):
        kept(remat="full", remat_save=("mlp.ups",))
    with pytest.raises(ValueError, match="remat_save=.* has no effect with remat='none'"):
        shallow("gpt2", remat_save=("mlp.up",))


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "mixed_windows"])
def test_compiled_is_not_compiled(name):
    cfg = shallow(name)
    np.testing.assert_allclose(loss(cfg)(tiny.drawn(cfg)), value_and_grad(cfg)[0], rtol=1e-5)


def test_parameters_may_be_numpy_arrays():
    """As they come from a file or from jax.device_get."""
    cfg = shallow("gpt2")
    params = tiny.drawn(cfg)
    read = jax.tree.map(np.asarray, params)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(read))
    assert jax.eval_shape(lambda: loss(cfg)(read)).shape == ()
    np.testing.assert_allclose(loss(cfg)(read), loss(cfg)(params), rtol=1e-6)


@pytest.mark.parametrize("name", ["transformer_base", "qwen3"])
def test_every_activation_has_a_name_of_its_own(name):
    cfg, names = shallow(name), []
    with jf.listen(lambda name, x: names.append(name) or x):
        jax.eval_shape(lambda p: jf.forward(p, tiny.tokens(cfg), cfg, **tiny.inputs(cfg)), tiny.drawn(cfg))
    assert len(names) > 6
    assert sorted(names) == sorted(set(names))


def test_dropout_is_the_layers_own_scanned_or_not():
    """Two layers that each add dropout(1), 0 or 2, to nothing: the sum is 0, 2 or 4, with one mask for both never 2."""
    cfg = shallow("gpt2", residual_dropout=0.5)
    params = jax.tree.map(lambda p: 0 * p, tiny.drawn(cfg))
    params["decoder"]["layers"]["mlp"]["down_bias"] += 1.0
    params["decoder"]["norm"]["gain"] += 1.0
    ids, key = tiny.tokens(cfg), jax.random.key(0)
    run = lambda cfg: jax.jit(lambda p: jf.hidden(p, ids, cfg, key=key))(params)
    out = run(cfg)
    values = [len(np.unique(np.round(row, 4))) for row in np.asarray(out).reshape(-1, cfg.d_model)]
    assert max(values) == 3
    np.testing.assert_allclose(run(dataclasses.replace(cfg, scan=True)), out, **CLOSE)
