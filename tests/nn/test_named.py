"""Named activations: captured, edited, checked, and free of charge where nobody listens (listeners: test_listening)."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxformer as jf
from jaxformer.nn import attend, attention, block, embedding, mlp, stack

pytestmark = pytest.mark.usefixtures("quick_compilation")
CFG = dataclasses.replace(tiny.PRESETS["llama_gqa"], n_layers=2)
PAIRS = dataclasses.replace(tiny.PRESETS["transformer_base"], n_layers=1, encoder_layers=1)


def captured(cfg, pattern="*", **given):
    params, tokens = tiny.drawn(cfg), tiny.tokens(cfg)
    run = jf.capture(lambda params, tokens: jf.forward(params, tokens, cfg, **given), pattern)
    return jax.jit(run)(params, tokens)


def plain(cfg, **given):
    return jax.jit(lambda params, tokens: jf.forward(params, tokens, cfg, **given))(tiny.drawn(cfg), tiny.tokens(cfg))


LAYER = {"attention.weights": (2, 2, 2, 9, 9), "attention.out": (2, 9, 32), "mlp.out": (2, 9, 32), "out": (2, 9, 32)}
LAYER |= {f"attention.{name}": (2, 2, 2, 9, 8) for name in ("query", "mixed")}
LAYER |= {f"attention.{name}": (2, 2, 9, 8) for name in ("key", "value")}
LAYER |= {f"mlp.{name}": (2, 9, 48) for name in ("gate", "up", "hidden")}
SHAPES = {f"decoder.{layer}.{name}": shape for layer in range(2) for name, shape in LAYER.items()}
SHAPES |= {"embedding": (2, 9, 32), "decoder.in": (2, 9, 32), "logits": (2, 9, 67)}


@pytest.mark.parametrize("fields", [{}, {"scan": True}, {"scan": True, "remat": "full"}], ids=str)
def test_capture_gives_every_activation_by_its_own_name(fields):
    """Under jit, and of scanned and rematerialised layers too."""
    cfg = dataclasses.replace(CFG, **fields)
    logits, seen = captured(cfg)
    assert {name: x.shape for name, x in seen.items()} == SHAPES
    np.testing.assert_array_equal(seen["logits"], logits)
    assert np.abs(seen["decoder.0.out"] - seen["decoder.1.out"]).max() > 0.1
    # the same sums, in an order of the compiler's choice
    np.testing.assert_allclose(logits, plain(cfg), atol=1e-5 * np.abs(logits).max(), rtol=0)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*attention.weights", {"decoder.0.attention.weights", "decoder.1.attention.weights"}),
        ("decoder.1.*", {name for name in SHAPES if name.startswith("decoder.1.")}),
        ("embedding", {"embedding"}),
    ],
)
def test_a_pattern_chooses(pattern, names):
    params = jax.eval_shape(lambda: jf.init(CFG, jax.random.key(0)))
    run = jf.capture(lambda params: jf.forward(params, tiny.tokens(CFG), CFG), pattern)
    assert jax.eval_shape(run, params)[1].keys() == names


def test_a_pattern_that_matches_nothing_names_the_nearest():
    run = jf.capture(lambda: jf.forward(jf.init(CFG, jax.random.key(0)), tiny.tokens(CFG), CFG), "decoder.1.atention.weights")
    with pytest.raises(ValueError, match=r"did you mean 'decoder\.1\.attention\.weights'"):
        jax.eval_shape(run)


def test_attention_weights_are_distributions_over_what_is_visible():
    valid = np.ones((2, 9), bool)
    valid[0, :2] = False
    _, seen = captured(CFG, "*weights", valid=valid)
    hidden = np.triu(np.ones((9, 9), bool), 1) | ~valid[:, None, None, None, :]
    for weights in seen.values():
        assert not np.asarray(weights)[np.broadcast_to(hidden, weights.shape)].any()
        # a row is a float32 sum of at most 9 shares; padding's own rows, which see nothing, are zero
        np.testing.assert_allclose(weights.sum(-1), np.broadcast_to(valid[:, None, None], weights.shape[:-1]), atol=1e-6)
        assert len(np.unique(np.asarray(weights[0, :, :, -1]).round(4))) > 10, "the weights differ by head and key"


def test_cross_attention_weights():
    given = tiny.inputs(PAIRS)
    _, seen = captured(PAIRS, "*weights", **given)
    assert seen.keys() == {
        f"{part}.weights" for part in ("encoder.0.attention", "decoder.0.attention", "decoder.0.cross_attention")
    }
    weights = np.asarray(seen["decoder.0.cross_attention.weights"])
    assert weights.shape == (2, 4, 1, 9, 7)
    assert not weights[0, ..., 5:].any() and weights[1, ..., 5:].all()
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)  # float32 sums of 7 shares
    assert np.asarray(seen["encoder.0.attention.weights"])[1].all(), "the encoder sees both ways"


def edited(cfg, name, edit):
    def run(params, tokens):
        with jf.listen({name: edit}):
            return jf.forward(params, tokens, cfg)

    return np.asarray(jax.jit(run)(tiny.drawn(cfg), tiny.tokens(cfg)))


def test_editing_changes_the_result():
    before = np.asarray(plain(CFG))
    assert np.abs(edited(CFG, "decoder.1.mlp.hidden", jnp.zeros_like) - before).max() > 0.1
    np.testing.assert_array_equal(edited(CFG, "logits", lambda x: x + 1), edited(CFG, "logits", lambda x: x) + 1)
    swapped = edited(CFG, "embedding", lambda x: x.at[:, 4].set(x[:, 5]))  # position 4 now reads another token
    np.testing.assert_allclose(swapped[:, :4], before[:, :4], atol=1e-5 * np.abs(before).max())  # as above
    assert (np.abs(swapped - before)[:, 4:].max(-1) > 1e-3).all()


def test_an_edit_is_what_the_rest_of_the_model_computes_with():
    """Without its attention weights and feed-forward the last block passes on what it was given."""
    cfg = dataclasses.replace(CFG, n_layers=1)
    params = tiny.drawn(cfg)

    @jax.jit
    def run(params):
        seen = {}

        def listener(name, x):
            seen[name] = x
            return jnp.zeros_like(x) if name.endswith(("weights", "hidden")) else x

        with jf.listen(listener):
            jf.forward(params, tiny.tokens(cfg), cfg)
        return seen

    seen = run(params)
    np.testing.assert_array_equal(seen["decoder.0.out"], seen["embedding"])
    assert np.asarray(seen["decoder.0.attention.weights"]).any()


@pytest.mark.parametrize(
    ("shape", "dims"), [((1, 2, 31), "BTD"), ((1, 2, 32), "BTF"), ((2, 32), "BTD"), ((1, 2, 32, 1), "BTD")]
)
def test_wrong_letters_raise(shape, dims):
    with pytest.raises(ValueError, match=r"activation 'wrong' has shape .* not \[B=any, T=any, [DF]=(32|48)\]"):
        jf.named(jnp.ones(shape), "wrong", dims, CFG)


def primitives(jaxpr, counts=None):
    """How often each primitive occurs, inner programs included."""
    counts = collections.Counter() if counts is None else counts
    for equation in jaxpr.eqns:
        counts[equation.primitive.name] += 1
        for value in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                primitives(inner, counts)
    return counts


@pytest.mark.parametrize("cfg", [CFG, PAIRS], ids=["decoder", "encoder-decoder"])
def test_without_a_listener_names_cost_nothing(cfg, monkeypatch):
    params = jax.eval_shape(lambda: jf.init(cfg, jax.random.key(0)))
    given = tiny.inputs(cfg)

    def trace():
        return primitives(jax.make_jaxpr(lambda params: jf.forward(params, tiny.tokens(cfg), cfg, **given))(params).jaxpr)

    marked = trace()
    for module in (attention, block, embedding, mlp, stack):
        monkeypatch.setattr(module, "named", lambda x, *_, **__: x)
    monkeypatch.setattr(attend, "checkpoint_name", lambda x, name: x)
    bare = trace()
    assert bare["name"] == 0 < marked.pop("name")
    assert marked == bare and bare["dot_general"] > 5
