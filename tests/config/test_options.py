"""Fields that single families need: encoders of their own size, norm of the embeddings, scale of the scores, bias and scale of
the head. Each changes exactly what its formula says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxformer as jf

pytestmark = pytest.mark.usefixtures("quick_compilation")
forward = jax.jit(jf.forward, static_argnums=2)

PAIRED = dataclasses.replace(tiny.PRESETS["transformer_base"], n_layers=1, encoder_layers=2)
OWN = dataclasses.replace(PAIRED, encoder_heads=8, encoder_d_ff=20)  # of 4 heads and 48
ALL = dataclasses.replace(OWN, embedding_norm=True, head_bias=True, scale_head=True, attention_scale=0.3, position="learned")
DECODER = tiny.PRESETS["llama_mha"]


def shapes(tree):
    return {path: leaf.shape for path, leaf in jf.spec.walk(tree)}


def run(params, cfg, **changes):
    cfg = dataclasses.replace(cfg, **changes)
    return np.asarray(forward(params, tiny.tokens(cfg), cfg, **tiny.inputs(cfg)))


def close(found, expected, roundings=1e-5):
    # float32, products and sums in another order: about a hundred roundings of the largest number
    assert np.abs(found - expected).max() <= roundings * np.abs(expected).max()


def far(found, expected):
    return np.abs(np.asarray(found) - expected).max() > 0.01 * np.abs(expected).max()


# An encoder of its own size


def test_shapes_of_an_encoder_of_its_own_size():
    own, plain = (shapes(jax.eval_shape(lambda: jf.init(cfg, jax.random.key(0)))) for cfg in (OWN, PAIRED))  # noqa: B023
    changed = {path.removeprefix("encoder.layers."): shape for path, shape in own.items() if shape != plain[path]}
    assert changed == {  # [L, D, K, G, H] and so on: 8 heads of 4 in place of 4 of 8
        "attention.query": (2, 32, 8, 1, 4),
        "attention.key": (2, 32, 8, 4),
        "attention.value": (2, 32, 8, 4),
        "attention.out": (2, 8, 1, 4, 32),
        "mlp.up": (2, 32, 20),
        "mlp.up_bias": (2, 20),
        "mlp.down": (2, 20, 32),
    }
    count = lambda cfg: jf.spec.count(jf.model.spec(cfg), cfg)
    assert count(PAIRED) - count(OWN) == 2 * (48 - 20) * (2 * 32 + 1)


def test_initial_weights_go_by_the_encoder_s_own_size():
    """Xavier's uniform reaches sqrt(6 / (inputs + outputs))."""
    for part, width in (("encoder", 20), ("decoder", 48)):
        param = jf.model.spec(OWN)[part]["layers"]["mlp"]["up"]
        largest = np.abs(param.init(jax.random.key(0), (1000,), "float32")).max()
        assert 0.98 < largest / np.sqrt(6 / (32 + width)) <= 1


def test_heads_of_the_encoder():
    params = tiny.drawn(OWN)
    given = {"tokens": tiny.tokens(OWN), **tiny.inputs(OWN)}
    _, seen = jax.eval_shape(jf.capture(lambda p: jf.forward(p, cfg=OWN, **given), "*.weights"), params)
    heads = {path.replace(".0.", ".").replace(".1.", "."): weights.shape[1] for path, weights in seen.items()}
    assert heads == {
        "encoder.attention.weights": 8,
        "decoder.attention.weights": 4,
        "decoder.cross_attention.weights": 4,
    }


def test_sizes_that_are_the_decoder_s_change_nothing():
    same = dataclasses.replace(PAIRED, encoder_heads=4, encoder_d_ff=48)
    assert shapes(jf.spec.abstract(jf.model.spec(same), same)) == shapes(jf.spec.abstract(jf.model.spec(PAIRED), PAIRED))
    params = tiny.drawn(PAIRED)
    np.testing.assert_array_equal(run(params, same), run(params, PAIRED))


def test_stacked_is_unstacked():
    params = tiny.drawn(ALL)
    plain = run(params, ALL)
    swapped = params | {"encoder": jax.tree.map(lambda p: p[::-1], params["encoder"])}
    assert far(run(swapped, ALL), plain), "the encoder is read, and its layers differ"
    np.testing.assert_array_equal(run(jf.model.unstack(params, ALL), ALL), plain)


def test_gradients_reach_every_parameter():
    batch = tiny.batch(ALL, length=tiny.PRESETS["transformer_base"].max_length)
    cfg = dataclasses.replace(ALL, scan=True)
    grads = jax.jit(jax.grad(lambda params: jf.loss(params, batch, cfg)[0]))(tiny.drawn(cfg))
    idle = [path for path, g in jf.spec.walk(grads) if not np.isfinite(g).all() or np.abs(g).max() < 1e-6]
    assert not idle


# The embeddings


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_embeddings_are_normalised_with_their_positions(norm):
    cfg = dataclasses.replace(tiny.PRESETS["decoder_2017_learned"], embedding_norm=True, norm=norm, n_layers=1)
    params = tiny.drawn(cfg)["decoder"]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, cfg.d_model)), jnp.float32)
    placed = np.asarray(x + params["position"]["table"][:5])
    if norm == "layer":
        placed = placed - placed.mean(-1, keepdims=True)
    placed = placed / np.sqrt((placed * placed).mean(-1, keepdims=True) + cfg.norm_eps) * params["embedding_norm"]["gain"]
    placed = placed + params["embedding_norm"].get("bias", 0.0)
    inside = dataclasses.replace(cfg, embedding_norm=False, position="none")
    apply = jax.jit(lambda params, x, cfg: jf.stack.apply(params, x, cfg).x_BTD, static_argnums=2)
    expected = apply(params, placed, inside)
    assert far(apply(params, x, dataclasses.replace(cfg, embedding_norm=False)), expected)
    close(apply(params, x, cfg), expected)


def test_encoder_and_decoder_have_a_norm_each():
    both = {path for path in shapes(tiny.drawn(ALL)) if "embedding_norm" in path}
    assert both == {f"{part}.embedding_norm.{name}" for part in ("encoder", "decoder") for name in ("gain", "bias")}
    mask = dict(jf.spec.walk(jf.spec.decay_mask(jf.model.spec(ALL))))
    assert not any(mask[path] for path in both | {"head.bias"})


# The scores


@pytest.mark.parametrize(("name", "softcap"), [("llama_mha", 2.0), ("transformer_base", None)])
def test_the_attention_scale_multiplies_all_scores(name, softcap):
    """As queries would that are scale · sqrt(H) times as large; before a soft-cap, in cross-attention too."""
    cfg = dataclasses.replace(tiny.PRESETS[name], n_layers=1, encoder_layers=tiny.PRESETS[name].encoder_layers and 1)
    scale, params = 0.9, tiny.drawn(cfg)
    larger = jax.tree_util.tree_map_with_path(
        lambda path, p: p * scale * cfg.head_dim**0.5 if path[-1].key == "query" else p, params
    )
    found = run(params, cfg, attention_scale=scale, attention_softcap=softcap)
    assert far(run(params, cfg, attention_softcap=softcap), found)
    close(found, run(larger, cfg, attention_softcap=softcap))


def test_the_default_scale_is_one_over_the_root_of_the_head_width():
    params = tiny.drawn(DECODER)
    np.testing.assert_allclose(run(params, DECODER, attention_scale=8**-0.5), run(params, DECODER), rtol=0, atol=1e-5)


# The head


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("scale", [False, True])
def test_the_head_s_bias_and_scale(tied, cap, scale):
    """logits = x W / sqrt(D) + b, then the soft-cap."""
    cfg = dataclasses.replace(DECODER, tied_head=tied, head_bias=True, scale_head=scale, logit_softcap=cap)
    params = tiny.drawn(cfg)
    assert jf.model.spec(cfg)["head"]["bias"] == jf.bias("V") and np.abs(params["head"]["bias"]).max() > 0.1
    kernel = params["embedding"]["token"].T if tied else params["head"]["kernel"]
    x = np.random.default_rng(0).standard_normal((2, 3, cfg.d_model)).astype(np.float32)
    expected = x @ np.asarray(kernel) / (np.sqrt(cfg.d_model) if scale else 1.0) + params["head"]["bias"]
    close(jf.model.head(params, jnp.asarray(x), cfg), cap * np.tanh(expected / cap) if cap else expected)


def test_the_hidden_states_are_not_scaled_and_the_loss_is_of_the_logits():
    cfg = dataclasses.replace(DECODER, scale_head=True, head_bias=True, n_layers=1)
    params, batch = tiny.drawn(cfg), tiny.batch(cfg)
    hidden = jax.jit(jf.hidden, static_argnums=2)
    plain = dataclasses.replace(cfg, scale_head=False)
    np.testing.assert_array_equal(hidden(params, batch["tokens"], cfg), hidden(params, batch["tokens"], plain))
    losses = [jax.jit(lambda params, c=c: jf.loss(params, batch, cfg, chunk=c)[0])(params) for c in (None, 3)]
    logits = np.asarray(forward(params, batch["tokens"], cfg), np.float64)
    nll = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    expected = (nll * batch["weights"]).sum() / batch["weights"].sum()
    np.testing.assert_allclose(losses, expected, rtol=1e-6)  # a float32 mean


def test_what_has_no_head_has_no_logits():
    cfg = dataclasses.replace(tiny.PRESETS["gpt2"], has_head=False)
    params, tokens = tiny.drawn(cfg), tiny.tokens(cfg)
    hidden = jf.hidden(params, tokens, cfg)
    for logits in (lambda: jf.forward(params, tokens, cfg), lambda: jf.model.head(params, hidden, cfg)):
        with pytest.raises(ValueError, match="has no head"):
            logits()


def test_parallel_branches_and_cross_attention_are_refused():
    with pytest.raises(ValueError, match="residual='parallel' is not defined for a decoder with cross-attention"):
        dataclasses.replace(tiny.PRESETS["transformer_base"], residual="parallel")
