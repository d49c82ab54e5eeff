"""Scaled rotary positions: every kind by its numbers, in a model, in a cache, in files; what is refused."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxformer as jf
from jaxformer.config.strict import from_dict, to_json
from jaxformer.nn import rope

pytestmark = pytest.mark.usefixtures("quick_compilation")
ORIGINAL, LENGTH, FILLER = 6, 14, 66

KINDS = {
    "linear": jf.RopeScaling("linear", 4.0),
    "dynamic": jf.RopeScaling("dynamic", 4.0, original_length=ORIGINAL),
    "llama3": jf.RopeScaling("llama3", 8.0, original_length=64, high_frequency=2.0),
    "yarn": jf.RopeScaling("yarn", 4.0, original_length=64),
}
BASE = dataclasses.replace(tiny.PRESETS["llama_gqa"], n_layers=2, rope_theta=100.0, head_dim=16)
CONFIGS = {kind: dataclasses.replace(BASE, rope_scaling=scaling) for kind, scaling in KINDS.items()}

forward = jax.jit(jf.forward, static_argnums=2)


def head(scaling, theta=10_000.0):
    """One head of 16."""
    return jf.ModelConfig(vocab_size=5, d_model=16, n_layers=1, n_heads=1, rope_theta=theta, rope_scaling=scaling)


def turned(cfg, x, positions):
    return np.asarray(jf.position.apply({}, jnp.asarray(x, jnp.float32), jnp.asarray(positions), cfg))


# The numbers

PLAIN = 10_000.0 ** -(np.arange(8) / 8)


def test_llama3():
    """Rule and numbers of Llama 3.1: low/high 1/4, factor 8."""
    cfg = head(jf.RopeScaling("llama3", 8.0, original_length=256))
    expected = [1, 0.316227766, 0.1, 0.006613106, 0.00125, 0.000395285, 0.000125, 0.0000395285]
    np.testing.assert_allclose(jf.rope.frequencies(cfg, 16), expected, rtol=1e-6)  # six digits are given
    # kept, blended, divided
    np.testing.assert_allclose(PLAIN / expected, [1, 1, 1, 4.7818, 8, 8, 8, 8], rtol=1e-4)
    assert jf.rope.attention_factor(cfg) == 1.0


def test_llama3_blends_by_turns_in_the_original_length():
    """Between 2 and 16 turns, in place of 1 and 4."""
    cfg = head(jf.RopeScaling("llama3", 8.0, original_length=4096, low_frequency=2.0, high_frequency=16.0))
    turns = 4096 * PLAIN / (2 * np.pi)
    kept = [1 if t > 16 else 0 if t < 2 else (t - 2) / (16 - 2) for t in turns]
    assert sum(0 < share < 1 for share in kept) == 2
    expected = [share * f + (1 - share) * f / 8 for share, f in zip(kept, PLAIN, strict=True)]
    np.testing.assert_allclose(jf.rope.frequencies(cfg, 16), expected, rtol=1e-6)


def test_yarn():
    cfg = head(jf.RopeScaling("yarn", 4.0, original_length=256))
    found = np.asarray(jf.rope.frequencies(cfg, 16))
    np.testing.assert_allclose(found[1:4], [0.25693506, 0.0625, 0.01383497], rtol=1e-6)  # seven digits are given
    np.testing.assert_allclose(found[[0, 4, 5, 6, 7]], PLAIN[[0, 4, 5, 6, 7]] / [1, 4, 4, 4, 4], rtol=1e-6)


def test_yarn_without_rounding_of_the_pairs():
    cfg = head(jf.RopeScaling("yarn", 4.0, original_length=256, beta_fast=8.0, beta_slow=2.0, truncate=False))
    pair = lambda turns: 16 * np.log(256 / (turns * 2 * np.pi)) / (2 * np.log(10_000))
    kept = 1 - np.clip((np.arange(8) - pair(8)) / (pair(2) - pair(8)), 0, 1)
    assert 0 < kept[2] < 1 and pair(8) % 1 > 0.1
    np.testing.assert_allclose(jf.rope.frequencies(cfg, 16), PLAIN * (kept + (1 - kept) / 4), rtol=1e-6)


@pytest.mark.parametrize(
    ("length", "kept"),
    [
        (100_000, [1, 1, 1, 1, 1, 1, 0.75, 0.5]),  # from pair 5 to 9, of which there are 8
        (16, [1, 0, 0, 0, 0, 0, 0, 0]),  # from before the first pair to 1
        (6, [1, 0, 0, 0, 0, 0, 0, 0]),  # both before the first
    ],
)
def test_yarn_where_it_blends_past_the_ends(length, kept):
    found = jf.rope.frequencies(head(jf.RopeScaling("yarn", 4.0, original_length=length)), 16)
    np.testing.assert_allclose(found, PLAIN * (np.array(kept) + (1 - np.array(kept)) / 4), rtol=1e-6)


@pytest.mark.parametrize(
    ("factor", "given", "expected"), [(4.0, None, 1.1386294), (4.0, 0.7, 0.7), (4.0, 1.0, 1.0), (0.5, None, 1.0)]
)
def test_the_attention_factor_of_yarn(factor, given, expected):
    """0.1 ln(factor) + 1, or what is given in its place; queries and keys are multiplied by it, and so scores by its square."""
    cfg = head(jf.RopeScaling("yarn", factor, original_length=256, attention_factor=given))
    np.testing.assert_allclose(jf.rope.attention_factor(cfg), expected, rtol=1e-7)
    x = np.random.default_rng(0).standard_normal((1, 1, 5, 16))
    lengths = np.linalg.norm(turned(cfg, x, [[0, 1, 7, 100, 500]]), axis=-1) / np.linalg.norm(x, axis=-1)
    np.testing.assert_allclose(lengths, expected, rtol=1e-6)  # a rotation changes no length


def test_linear_divides_the_positions():
    x = np.random.default_rng(0).standard_normal((1, 1, 4, 16))
    scaled, plain = head(jf.RopeScaling("linear", 4.0)), head(None)
    assert np.abs(turned(scaled, x, [[0, 4, 8, 40]]) - turned(plain, x, [[0, 4, 8, 40]])).max() > 1
    # an angle of 40 is known to 4e-6
    np.testing.assert_allclose(turned(scaled, x, [[0, 4, 8, 40]]), turned(plain, x, [[0, 1, 2, 10]]), atol=1e-5)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 300, 1024])
def test_dynamic_goes_by_the_length(length):
    cfg = head(jf.RopeScaling("dynamic", 4.0, original_length=256))
    found = jf.rope.frequencies(cfg, 16, jnp.array([length]))[0]
    base = 10_000 * (4 * length / 256 - 3) ** (16 / 14) if length > 256 else 10_000
    np.testing.assert_allclose(found, base ** -(np.arange(8) / 8), rtol=1e-5)  # a float32 power of up to 1e5
    assert (length > 256) == (np.abs(found[1:] / PLAIN[1:] - 1).max() > 1e-3)


def test_dynamic_goes_by_the_length_of_each_row():
    x = np.random.default_rng(0).standard_normal((2, 1, 3, 16))
    cfg, both = head(jf.RopeScaling("dynamic", 4.0, original_length=256)), np.array([[0, 5, 9], [0, 5, 400]])
    found, *alone = (turned(cfg, x[rows], both[rows]) for rows in (slice(0, 2), slice(0, 1), slice(1, 2)))
    np.testing.assert_array_equal(found, np.concatenate(alone))
    assert np.abs(found[1, :, 1] - turned(cfg, x[1:], both[:1])[0, :, 1]).max() > 0.1


# In a model


def through_the_cache(cfg, params, ids, first, valid=None):
    cache, parts = jf.init_cache(cfg, len(ids), LENGTH), []
    for start, stop in ((0, first), *((t, t + 1) for t in range(first, ids.shape[1]))):
        given = {} if valid is None else {"valid": valid[:, start:stop]}
        part, cache = tiny.forward_cached(params, ids[:, start:stop], cfg, cache, **given)
        parts.append(part)
    return np.concatenate(parts, axis=1)


def close(found, expected):
    # float32 sums in another order: about a hundred roundings of the largest logit
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def far(found, expected):
    return np.abs(np.asarray(found) - expected).max() > 1e-2 * np.abs(expected).max()


def test_cached_is_uncached():
    """Left-padded in its first chunk, too."""
    cfg, params, ids = CONFIGS["yarn"], tiny.drawn(BASE), tiny.tokens(BASE, length=LENGTH)
    valid = np.ones(ids.shape, bool)
    ids[0, :3], valid[0, :3] = FILLER, False
    whole = np.asarray(forward(params, ids, cfg, valid=valid))
    assert far(forward(params, ids, BASE, valid=valid), whole), "scaling is seen"
    close(through_the_cache(cfg, params, ids, 5, valid)[valid], whole[valid])


def test_dynamic_with_a_cache_stays_within_the_original_length():
    """Past it every key would change with every token: refused, not approximated."""
    cfg = CONFIGS["dynamic"]
    params, ids = tiny.drawn(cfg), tiny.tokens(cfg, length=ORIGINAL)
    whole = np.asarray(forward(params, ids, cfg))
    cache = jf.init_cache(cfg, 2, ORIGINAL)
    start, cache = tiny.forward_cached(params, ids[:, :4], cfg, cache)
    rest, _ = tiny.forward_cached(params, ids[:, 4:], cfg, cache)
    close(np.concatenate([start, rest], axis=1), whole)
    out = jf.generate(params, ids[:, :3], cfg, max_new_tokens=4)
    logits = np.asarray(forward(params, np.concatenate([ids[:, :3], out.tokens[:, :3]], axis=1), cfg))
    np.testing.assert_array_equal(out.tokens, logits[:, 2:].argmax(-1))
    with pytest.raises(ValueError, match="a cache cannot hold 7 tokens"):
        jf.init_cache(cfg, 2, ORIGINAL + 1)
    with pytest.raises(ValueError, match="original_length=6"):
        jf.generate(params, ids[:, :3], cfg, max_new_tokens=5)
    with pytest.raises(ValueError, match="original_length=6"):
        jf.beam_search(params, ids[:, :3], cfg, max_new_tokens=5)
    with pytest.raises(ValueError, match="positions cannot be given with a cache"):
        jf.forward_cached(params, ids[:, :2], cfg, jf.init_cache(cfg, 2, 4), positions=np.array([[3, 9]]))


def test_dynamic_refuses_packed_documents():
    cfg = CONFIGS["dynamic"]
    with pytest.raises(ValueError, match="segments cannot be combined"):
        jf.forward(tiny.drawn(cfg), tiny.tokens(cfg), cfg, segments=np.zeros((2, 9), int))


def test_a_packed_document_is_as_alone():
    cfg = CONFIGS["yarn"]
    params, ids = tiny.drawn(cfg), tiny.tokens(cfg, length=LENGTH)
    segments = np.repeat([[0] * 10 + [1] * 4], 2, axis=0)
    alone = np.asarray(forward(params, ids[:, 10:], cfg))
    assert far(forward(params, ids, cfg)[:, 10:], alone)
    close(np.asarray(forward(params, ids, cfg, segments=segments))[:, 10:], alone)


@pytest.mark.parametrize("kind", ["yarn", "dynamic"])
def test_gradients_are_finite(kind):
    cfg = dataclasses.replace(CONFIGS[kind], n_layers=1)
    batch = tiny.batch(cfg, rows=2, length=LENGTH)
    grads = jax.jit(jax.grad(lambda params: jf.loss(params, batch, cfg)[0]))(tiny.drawn(cfg))
    assert all(np.isfinite(g).all() and np.abs(g).max() > 1e-6 for g in jax.tree.leaves(grads))


# Files, and what is refused


@pytest.mark.parametrize("kind", [*KINDS, None])
def test_json_gives_the_scaling_back(kind):
    cfg = CONFIGS[kind] if kind else BASE
    again = from_dict(jf.ModelConfig, json.loads(to_json(cfg)))
    assert again == cfg and hash(again) == hash(cfg) and type(again.rope_scaling) is type(cfg.rope_scaling)
    assert len({*CONFIGS.values(), BASE, again}) == 5


def test_none_is_no_scaling():
    assert dataclasses.replace(CONFIGS["yarn"], rope_scaling=None) == BASE
    text = to_json(CONFIGS["yarn"]).replace('"yarn"', '"yarm"')
    with pytest.raises(ValueError, match="kind 'yarm'; did you mean 'yarn'"):
        from_dict(jf.ModelConfig, json.loads(text))


WRONG = [
    ({"kind": "ntk"}, "unknown kind 'ntk'"),
    ({"kind": "lineer"}, "unknown kind 'lineer'; did you mean 'linear'"),
    *(({"kind": kind, "original_length": None}, f"'{kind}' needs original_length") for kind in ("dynamic", "llama3", "yarn")),
    ({"original_length": 0}, "original_length=0 must be above 0"),
    ({"original_length": 16.0}, "original_length=16.0 must be an integer"),
    ({"factor": 0.0}, "factor=0.0 must be above 0"),
    ({"factor": -2.0}, "factor=-2.0"),
    ({"factor": float("nan")}, "factor=nan must be a finite number"),
    ({"factor": "4"}, "factor='4' must be a finite number"),
    ({"low_frequency": 0.0}, "low_frequency=0.0"),
    ({"low_frequency": 4.0}, "low_frequency=4.0 must be below high_frequency=4.0"),
    ({"beta_slow": 0.0}, "beta_slow=0.0"),
    ({"beta_fast": float("inf")}, "beta_fast=inf"),
    ({"beta_fast": 1.0}, "beta_slow=1.0 must be below beta_fast=1.0"),
    ({"attention_factor": 0.0}, "attention_factor=0.0"),
    ({"truncate": 1}, "truncate=1 must be True or False"),
    ({"mscale": 1.0}, "no field 'mscale'"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_scalings_are_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        jf.RopeScaling(**{"kind": "yarn", "factor": 4.0, "original_length": 16} | change)


@pytest.mark.parametrize("scaling", ["yarn", {"kind": "linear", "factor": 2.0}, 4.0])
def test_what_is_no_scaling_is_refused(scaling):
    with pytest.raises(ValueError, match="rope_scaling=.* must be RopeScaling"):
        dataclasses.replace(BASE, rope_scaling=scaling)


def test_dynamic_needs_more_than_one_pair():
    """Its exponent is H / (H − 2)."""
    with pytest.raises(ValueError, match="head_dim=2"):
        dataclasses.replace(CONFIGS["dynamic"], head_dim=2)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_form_for_tpus_is_the_plain_one(layout, dtype, monkeypatch):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 3, 5, 16)), dtype)
    angle = jnp.asarray(rng.uniform(0, 100, (5, 8)), jnp.float32)
    rotated, back = {}, {}
    for platform in ("cpu", "tpu"):
        monkeypatch.setattr(rope, "platform", lambda platform=platform: platform)
        rotated[platform], pull = jax.vjp(lambda x: rope.rotate(x, angle, layout, 1.5), x)
        (back[platform],) = pull(jnp.cos(rotated["cpu"].astype(jnp.float32)).astype(dtype))
    assert float(jnp.abs(rotated["cpu"].astype(jnp.float32) - x.astype(jnp.float32)).max()) > 1
    # Products are the same; their sum may be rounded once less. Both terms of a bfloat16 gradient are rounded, then their sum.
    for found, roundings in ((rotated, 1), (back, 2)):
        bound = {"float32": 4e-7, "bfloat16": roundings * 2**-8}[dtype] * float(jnp.abs(found["cpu"]).max())
        np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in found.values()), atol=bound, rtol=0)
