"""Mistakes that are easy to make in a transformer. Each has a check that the library passes, and that fails as soon as the
mistake is made in the library's own functions: so the check is known to catch it.

Checks compile what they run anew each time, so that no earlier trace stands in for the mistake.
"""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import mutations as m
import numpy as np
import pytest
import tiny

import jaxformer as jf
from jaxformer.data import packing
from jaxformer.nn import attend as attend_module
from jaxformer.nn import attention, block, mask, mlp, norm, position, rope

pytestmark = pytest.mark.usefixtures("quick_compilation")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # float32 sums of some dozens of terms of size 1
D, H = 32, 8  # of the tiny presets
ROPE = dataclasses.replace(tiny.PRESETS["llama_mha"], n_layers=2)
LEARNED = dataclasses.replace(tiny.PRESETS["gpt2"], n_layers=2)
SINUSOIDAL = dataclasses.replace(tiny.PRESETS["decoder_2017"], n_layers=2, residual="pre")
NO_POSITION = dataclasses.replace(ROPE, position="none")
NORMS = {name: dataclasses.replace(ROPE, norm=name) for name in ("layer", "rms")}


def draw(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def fresh(f, *args):
    return jax.jit(lambda *args: f(*args))(*args)


@cache
def part(cfg, name):
    """The first layer's parameters of one part of a block, or all of them."""
    layer = jax.tree.map(lambda p: p[0], tiny.drawn(cfg)["decoder"]["layers"])
    return layer[name] if name else layer


def weights_of(cfg, x, **where):
    params = part(cfg, "attention")
    return fresh(jf.capture(lambda x: attention.apply(params, x, cfg, **where), "weights"), x)[1]["weights"]


def each_query_spreads_1_over_its_keys():
    np.testing.assert_allclose(weights_of(ROPE, draw(2, 6, D)).sum(-1), 1.0, rtol=1e-5)


def queries_and_keys_may_differ_in_number():
    params, ids = tiny.drawn(LEARNED), tiny.tokens(LEARNED, length=4)
    whole = fresh(lambda ids: jf.forward(params, ids, LEARNED), ids)
    cache, parts = jf.init_cache(LEARNED, 2, 6), []
    for i in range(4):
        logits, cache = fresh(lambda ids, cache: jf.forward_cached(params, ids, LEARNED, cache), ids[:, i : i + 1], cache)
        parts.append(logits)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, **CLOSE)


def scores_are_scaled_by_the_head_width():
    cfg, x = dataclasses.replace(NO_POSITION, causal=False), draw(1, 5, D)
    q = attention.query(part(cfg, "attention"), x, cfg)
    k, _, _ = attention.key_value(part(cfg, "attention"), x, cfg, mask.arange(5))
    expected = jax.nn.softmax(np.einsum("bkgth,bksh->bkgts", q, k) / np.sqrt(H))
    np.testing.assert_allclose(weights_of(cfg, x), expected, **CLOSE)


def a_block_whose_sublayers_give_nothing_is_the_identity():
    params, x = part(ROPE, None), draw(2, 3, D)
    silent = {name: params[name] | {out: 0 * params[name][out]} for name, out in (("attention", "out"), ("mlp", "down"))}
    np.testing.assert_array_equal(fresh(lambda x: block.apply(params | silent, x, ROPE).x_BTD, x), x)


def heads_are_mixed():
    params, x = part(ROPE, "attention"), draw(1, 4, D)
    moved = params | {"value": params["value"].at[:, 0].add(1.0)}
    run = lambda params: attention.apply(params, x, ROPE)[0]
    change = np.abs(fresh(run, moved) - fresh(run, params))
    assert change[..., :H].max() > 0.1 and change[..., H:].max() > 0.1


def every_layer_has_its_own_parameters_keys_and_values():
    batch = tiny.batch(ROPE, rows=2, length=4)
    grads = fresh(jax.grad(lambda p: jf.loss(p, batch, ROPE)[0]), tiny.drawn(ROPE))["decoder"]["layers"]
    for kernel in (grads["attention"]["key"], grads["attention"]["value"], grads["mlp"]["up"]):
        assert (np.abs(kernel).max(tuple(range(1, kernel.ndim))) > 1e-5).all()


def a_token_is_normalised_by_itself(name):
    params, x = {"gain": jnp.ones(D), "bias": jnp.zeros(D)}, 3 * draw(3, 4, D) + 1
    alone = norm.apply(params, x[1:2, 2:3], NORMS[name])
    np.testing.assert_allclose(norm.apply(params, x, NORMS[name])[1:2, 2:3], alone, **CLOSE)


def layer_norm_of_1_2_3():
    cfg = jf.ModelConfig(vocab_size=3, d_model=3, n_layers=1, n_heads=1, norm_eps=0.1, position="none")
    y = norm.apply({"gain": jnp.ones(3), "bias": jnp.zeros(3)}, jnp.array([1.0, 2.0, 3.0]), cfg)
    np.testing.assert_allclose(y, np.array([-1, 0, 1]) / np.sqrt(2 / 3 + 0.1), rtol=1e-6)


def the_target_is_the_next_token():
    stream = packing.Stream(np.arange(10, 19, dtype=np.int32), np.array([0, 9]))
    batch = packing.windows(stream, np.array([0, 4]), length=4, pad_id=0, segment_documents=False)
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)


def a_position_sees_itself_and_what_is_before():
    params, x = part(ROPE, "attention"), draw(1, 5, D)
    run = lambda x: attention.apply(params, x, ROPE)[0][0].sum(-1)
    reach = np.abs(fresh(jax.jacrev(run), x))[:, 0].max(-1) > 0
    np.testing.assert_array_equal(reach, np.tril(np.ones((5, 5))))


def a_row_that_sees_nothing_is_zero_with_finite_gradients():
    seen = np.array([[[0, 0, 0], [1, 0, 0], [1, 1, 0]]], bool)
    q, k, v = draw(1, 1, 1, 3, 4), draw(1, 1, 3, 4), draw(1, 1, 3, 4, seed=1)
    out, back = jax.vjp(lambda *qkv: attend_module.attend(*qkv, seen), q, k, v)
    assert (out[0, 0, 0, 0] == 0).all()
    for gradient in back(jnp.ones_like(out)):
        assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(out[0, 0, 0, 1], v[0, 0, 0])


def large_scores_stay_finite():
    q, k, v = draw(1, 1, 1, 3, 64), draw(1, 1, 3, 64), draw(1, 1, 3, 4)
    seen = np.ones((1, 3, 3), bool)
    for scale, dtype in ((100, "float16"), (100, "float32")):  # q kᵀ of about 80,000, past float16's 65,504
        large = [(scale * x).astype(dtype) for x in (q, k)]
        exact = np.einsum("th,sh->ts", *(np.asarray(x, np.float64).squeeze() for x in large)) / 8
        best = np.asarray(v)[0, 0][exact.argmax(-1)]  # the largest leads by hundreds: its weight is 1
        np.testing.assert_allclose(attend_module.attend(*large, v.astype(dtype), seen)[0, 0, 0], best, rtol=1e-3)


def squares_do_not_overflow(name):
    params, x = {"gain": jnp.ones(D), "bias": jnp.zeros(D)}, 300 * draw(1, 2, D)  # up to 800: squares are past 65,504
    exact = norm.apply(params, x, NORMS[name])
    np.testing.assert_allclose(norm.apply(params, x.astype("float16"), NORMS[name]), exact, rtol=2e-3, atol=2e-3)  # float16


def neighbours_far_out_differ():
    cfg = dataclasses.replace(ROPE, dtype="bfloat16")
    turned = position.apply({}, jnp.ones((1, 1, 2, H), "bfloat16"), jnp.array([[256, 257]]), cfg)
    assert np.abs(turned[..., 0, :] - turned[..., 1, :]).max() > 0.5


def positions_are_added_once(cfg):
    """With silent sublayers the final norm reads the embedding and its position."""
    params, ids = tiny.drawn(cfg), tiny.tokens(cfg, length=4)
    silent = {"attention": ("out", "out_bias"), "mlp": ("down", "down_bias")}
    layers = dict(params["decoder"]["layers"])
    for name, outs in silent.items():
        layers[name] = layers[name] | {out: 0 * layers[name][out] for out in outs if out in layers[name]}
    found = fresh(lambda ids: jf.hidden(params | {"decoder": params["decoder"] | {"layers": layers}}, ids, cfg), ids)
    x = np.asarray(params["embedding"]["token"])[ids] * (D**0.5 if cfg.scale_embedding else 1)
    if cfg.position == "learned":
        x = x + np.asarray(params["decoder"]["position"]["table"])[:4]
    else:
        x = x + np.asarray(position.sinusoids(jnp.arange(4), D))
    np.testing.assert_allclose(found, norm.apply(params["decoder"]["norm"], jnp.asarray(x), cfg), **CLOSE)


def rope_turns_once():
    x, at = draw(1, 5, D), jnp.arange(5)[None]
    q = attention.query(part(ROPE, "attention"), x, ROPE)
    k, _, _ = attention.key_value(part(ROPE, "attention"), x, ROPE, mask.arange(5))
    angle = position.angles(at[0], H, ROPE.rope_theta)
    q, k = (rope.rotate(x, angle, "interleaved") for x in (q, k))
    scores = np.where(np.tril(np.ones((5, 5), bool)), np.einsum("bkgth,bksh->bkgts", q, k) / np.sqrt(H), -np.inf)
    np.testing.assert_allclose(weights_of(ROPE, x), jax.nn.softmax(scores), **CLOSE)


def only_distances_count():
    params, x = part(ROPE, "attention"), draw(1, 5, D)
    run = lambda info: attention.apply(params, x, ROPE, info=info)[0]
    info = mask.arange(5)
    shifted = info.replace(position=info.position + 7)
    np.testing.assert_allclose(fresh(run, shifted), fresh(run, info), **CLOSE)


def a_position_past_the_table_is_not_the_last_one():
    params, x = {"table": draw(6, D)}, draw(1, 2, D)
    run = lambda at: position.apply(params, x, at, LEARNED)
    assert np.isfinite(fresh(run, np.array([[4, 5]]))).all()
    assert np.isnan(fresh(run, np.array([[5, 6]]))[0, 1]).all()


def neighbouring_query_heads_share_a_key_value_head():
    q, k = draw(1, 2, 2, 3, 4), draw(1, 2, 3, 4)
    v = jnp.broadcast_to(jnp.array([1.0, 2.0])[None, :, None, None], k.shape)
    heads = attend_module.attend(q, k, v, None).reshape(4, 3, 4)
    np.testing.assert_allclose(heads[:, 0, 0], [1, 1, 2, 2], rtol=1e-6)


def a_feed_forward_takes_each_position_by_itself():
    params, x = part(ROPE, "mlp"), draw(2, 4, D)
    np.testing.assert_allclose(mlp.apply(params, x, ROPE)[:, 2:3], mlp.apply(params, x[:, 2:3], ROPE), **CLOSE)


def a_feed_forward_is_not_affine():
    params, a, b = part(LEARNED, "mlp"), draw(1, 3, D), draw(1, 3, D, seed=1)
    f = lambda x: mlp.apply(params, x, LEARNED)
    assert np.abs(f(a + b) - f(a) - f(b) + f(0 * a)).max() > 0.1


def pre_ln_ends_with_a_norm():
    params = tiny.drawn(LEARNED)
    plain = {"gain": jnp.ones(D), "bias": jnp.zeros(D)}
    params = params | {"decoder": params["decoder"] | {"norm": plain}}
    hidden = fresh(lambda ids: jf.hidden(params, ids, LEARNED), tiny.tokens(LEARNED))
    np.testing.assert_allclose((hidden**2).mean(-1), 1, rtol=1e-3)  # epsilon is 1e-5 of a variance of about 0.1


def padding_is_not_seen():
    params, ids = tiny.drawn(ROPE), tiny.tokens(ROPE, batch=1, length=5)
    valid = np.array([[False, False, True, True, True]])
    padded = fresh(lambda ids: jf.forward(params, ids, ROPE, valid=valid), ids)
    alone = fresh(lambda ids: jf.forward(params, ids, ROPE), ids[:, 2:])
    np.testing.assert_allclose(padded[:, 2:], alone, **CLOSE)


NORMALISED, ROW = a_token_is_normalised_by_itself, a_row_that_sees_nothing_is_zero_with_finite_gradients
ADDED, CAUSAL = positions_are_added_once, a_position_sees_itself_and_what_is_before
LAYERS = every_layer_has_its_own_parameters_keys_and_values
MISTAKES = {
    "softmax over the heads": (each_query_spreads_1_over_its_keys, m.attend_with(m.over_heads)),
    "one length for queries and keys": (queries_and_keys_may_differ_in_number, m.ONE_LENGTH),
    "scale sqrt(D)": (scores_are_scaled_by_the_head_width, m.scale_by(D)),
    "no scale": (scores_are_scaled_by_the_head_width, m.scale_by(1)),
    "LN(x) + f(LN(x))": (a_block_whose_sublayers_give_nothing_is_the_identity, m.block_with(lambda x, y, f: y + f(y))),
    "no residual": (a_block_whose_sublayers_give_nothing_is_the_identity, m.block_with(lambda x, y, f: f(y))),
    "concat is not mixed": (heads_are_mixed, m.CONCAT),
    "keys and values of the layer before": (LAYERS, m.reused_key_value()),
    "one layer's parameters for all": (LAYERS, m.REUSED_PARAMETERS),
    "LayerNorm over the batch": (partial(NORMALISED, "layer"), m.norm_with(axis=(0, 1))),
    "RMSNorm over the batch": (partial(NORMALISED, "rms"), m.norm_with(axis=(0, 1))),
    "LayerNorm over the sequence too": (partial(NORMALISED, "layer"), m.norm_with(axis=(1, 2))),
    "unbiased variance": (layer_norm_of_1_2_3, m.norm_with(ddof=1)),
    "epsilon outside the root": (layer_norm_of_1_2_3, m.norm_with(root=lambda v, eps: jnp.sqrt(v) + eps)),
    "no final norm": (pre_ln_ends_with_a_norm, m.NO_FINAL_NORM),
    "current token as target": (the_target_is_the_next_token, m.CURRENT_TOKEN),
    "next token seen": (CAUSAL, m.see_with(lambda distance: distance >= -1)),
    "own token not seen": (CAUSAL, m.see_with(lambda distance: distance > 0)),
    "masked by infinity alone": (ROW, m.attend_with(m.infinity)),
    "masked by the least number": (ROW, m.attend_with(m.minimum)),
    "zeroed after the softmax": (ROW, m.attend_with(m.infinity, finish=m.zeroed)),
    "padding seen": (padding_is_not_seen, m.SEEN_PADDING),
    "scores in the low precision": (large_scores_stay_finite, m.attend_with(m.masked, dtype=None)),
    "softmax without its maximum": (large_scores_stay_finite, m.attend_with(m.no_maximum)),
    "LayerNorm in the low precision": (partial(squares_do_not_overflow, "layer"), m.norm_with()),
    "RMSNorm in the low precision": (partial(squares_do_not_overflow, "rms"), m.norm_with()),
    "positions in the low precision": (neighbours_far_out_differ, m.BFLOAT16_POSITIONS),
    "learned positions added twice": (partial(ADDED, LEARNED), m.IN_THE_EMBEDDING_TOO),
    "sinusoids added twice": (partial(ADDED, SINUSOIDAL), m.IN_THE_EMBEDDING_TOO),
    "positions added in every block": (partial(ADDED, LEARNED), m.IN_EVERY_BLOCK),
    "RoPE twice": (rope_turns_once, m.TWICE),
    "RoPE on values": (only_distances_count, m.TURNED_VALUES),
    "positions clamped": (a_position_past_the_table_is_not_the_last_one, m.CLAMPED),
    "query head h reads head h % K": (neighbouring_query_heads_share_a_key_value_head, m.GROUPS),
    "feed-forward over positions": (a_feed_forward_takes_each_position_by_itself, m.MIXED_POSITIONS),
    "feed-forward without activation": (a_feed_forward_is_not_affine, m.AFFINE),
}


def commit(mutation, monkeypatch):
    for module, name, wrong in mutation:
        monkeypatch.setattr(module, name, wrong)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_passes_and_catches_the_mistake(mistake, monkeypatch):
    check, mutation = MISTAKES[mistake]
    check()
    commit(mutation, monkeypatch)
    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize(
    ("mutation", "checks"),
    [
        (m.attend_with(m.masked), [each_query_spreads_1_over_its_keys, ROW, large_scores_stay_finite]),
        (m.block_with(lambda x, y, f: x + f(y)), [a_block_whose_sublayers_give_nothing_is_the_identity, LAYERS]),
        (m.norm_with(lambda x: x.astype(jnp.float32)), [layer_norm_of_1_2_3, partial(squares_do_not_overflow, "layer")]),
        (m.see_with(lambda distance: distance >= 0), [CAUSAL]),
    ],
)
def test_what_carries_the_mistakes_is_right_without_them(mutation, checks, monkeypatch):
    commit(mutation, monkeypatch)
    for check in checks:
        check()
