"""Relative positions in buckets: the buckets themselves, what is added to the scores, caches, padding, packing, gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxformer as jf

pytestmark = pytest.mark.usefixtures("quick_compilation")
DISTANCES = np.arange(-300, 301)
LENGTH = 12
FILLER = 66

CFG = dataclasses.replace(
    tiny.PRESETS["llama_gqa"], position="relative", relative_buckets=6, relative_distance=9, n_layers=2, scan=True
)
CONFIGS = {"full": CFG, "windowed": dataclasses.replace(CFG, window=4)}
forward = jax.jit(jf.forward, static_argnums=2)


def bucket(distance, number, longest, causal):
    """In whole numbers. Of the ``wide`` buckets that grow by equal factors from ``exact`` to ``longest``, the last that begins
    at ``far`` or before: (far / exact) ** wide >= (longest / exact) ** k."""
    if not causal:
        number //= 2
        if distance > 0:
            return number + bucket(-distance, number, longest, True)
    far, exact = (max(-distance, 0), number // 2)
    if far < exact:
        return far
    wide = number - exact
    return exact + max(k for k in range(wide) if far**wide * exact**k >= longest**k * exact**wide)


def configured(number, longest, causal):
    fields = {"vocab_size": 5, "d_model": 4, "n_layers": 1, "n_heads": 1, "position": "relative", "causal": causal}
    return jf.ModelConfig(**fields, relative_buckets=number, relative_distance=longest)


# T5's own; small and odd ones; those whose edges are whole numbers, where float32 falls on either side
NUMBERS = [(32, 128), (8, 12), (7, 20), (64, 256), (4, 300), (6, 100), (19, 100), (20, 1000), (64, 50)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("number", "longest"), NUMBERS)
def test_buckets(number, longest, causal):
    cfg = configured(number, longest, causal)
    expected = [bucket(int(distance), number, longest, causal) for distance in DISTANCES]
    assert set(expected) <= set(range(number)) and len(set(expected)) > number // 2
    np.testing.assert_array_equal(jax.jit(lambda d: jf.position.buckets(d, cfg))(DISTANCES), expected)
    np.testing.assert_array_equal(jf.position.buckets(jnp.asarray(DISTANCES), cfg), expected)


def test_buckets_of_t5_by_hand():
    """32 buckets up to 128. Both ways: 8 of one distance each, then 8 · 2^(k/2); causal: 16 and 16 · 2^(3k/16)."""
    both, causal = (
        dict(
            zip(DISTANCES.tolist(), np.asarray(jf.position.buckets(DISTANCES, configured(32, 128, way))).tolist(), strict=True)
        )
        for way in (False, True)
    )
    of = {0: 0, -1: 1, -7: 7, -8: 8, -11: 8, -12: 9, -15: 9, -16: 10, -63: 13, -64: 14, -91: 15, -127: 15, -300: 15}
    assert {d: both[d] for d in of} == of
    assert all(both[-d] == 16 + b for d, b in of.items() if d)
    assert {d: causal[d] for d in (5, 0, -15, -16, -18, -19, -112, -113, -300)} == (
        {5: 0, 0: 0, -15: 15, -16: 16, -18: 16, -19: 17, -112: 30, -113: 31, -300: 31}
    )


# The bias


def test_the_table_is_added_to_the_scaled_scores():
    cfg = dataclasses.replace(CFG, causal=False)
    rng = np.random.default_rng(0)
    params = {
        name: jnp.asarray(rng.standard_normal(param.shape(cfg)), jnp.float32) for name, param in jf.attention.spec(cfg).items()
    }
    table = rng.standard_normal((6, 2, 2)).astype(np.float32)  # [P, K, G]
    x = jnp.asarray(rng.standard_normal((1, 7, cfg.d_model)), jnp.float32)
    run = jf.capture(lambda cfg, **given: jf.attention.apply(params, x, cfg, **given), "weights")
    (_, biased), (_, plain) = run(cfg, position_params={"table": table}), run(dataclasses.replace(cfg, position="none"))
    expected = np.array(plain["weights"])
    for t, s in np.ndindex(7, 7):
        expected[..., t, s] *= np.exp(table[bucket(s - t, 6, 9, causal=False)])
    expected /= expected.sum(-1, keepdims=True)
    assert np.abs(expected - plain["weights"]).max() > 0.1
    # scores of size 30, which float32 knows to 4e-6, are exponents
    np.testing.assert_allclose(biased["weights"], expected, rtol=0, atol=1e-4)


def test_encoder_and_decoder_have_a_table_each_of_their_own_heads():
    cfg = dataclasses.replace(tiny.PRESETS["transformer_base"], position="relative", relative_buckets=6, encoder_heads=8)
    params = jax.eval_shape(lambda: jf.init(cfg, jax.random.key(0)))
    assert {part: params[part]["position"]["table"].shape for part in ("encoder", "decoder")} == {
        "encoder": (6, 8, 1),
        "decoder": (6, 4, 1),
    }


def test_only_distances_count():
    params, ids = tiny.drawn(CFG), tiny.tokens(CFG, length=LENGTH)
    run = lambda positions: np.asarray(forward(params, ids, CFG, positions=positions))
    plain = run(np.arange(LENGTH)[None])
    np.testing.assert_array_equal(run(np.arange(LENGTH)[None] + 1000), plain)
    assert np.abs(run(2 * np.arange(LENGTH)[None]) - plain).max() > 0.1


def test_a_packed_document_is_as_alone():
    params, ids = tiny.drawn(CFG), tiny.tokens(CFG, length=LENGTH)
    segments = np.repeat([[0] * 5 + [1] * 7], 2, axis=0)
    packed, alone = forward(params, ids, CFG, segments=segments), forward(params, ids[:, 5:], CFG)
    assert np.abs(forward(params, ids, CFG)[:, 5:] - alone).max() > 0.1
    np.testing.assert_allclose(packed[:, 5:], alone, rtol=0, atol=1e-5)  # logits of size 3, sums in another order


# The cache


@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_and_steps_through_the_cache_are_the_whole(name):
    """Two rows, one padded on the left in its first chunk, then single tokens; a window's cache is a ring."""
    cfg = CONFIGS[name]
    params, ids, valid = tiny.drawn(cfg), tiny.tokens(cfg, length=LENGTH), np.ones((2, LENGTH), bool)
    ids[0, :3], valid[0, :3] = FILLER, False
    whole = np.asarray(forward(params, ids, cfg, valid=valid))
    alone = np.asarray(forward(params, ids[:1, 3:], cfg))
    scale = np.abs(whole).max()
    assert np.abs(np.asarray(forward(params, ids, cfg))[0, 3:] - alone[0]).max() > 0.01 * scale, "padding is seen"
    reversed_ = params["decoder"] | {"position": {"table": params["decoder"]["position"]["table"][::-1]}}
    other = forward(params | {"decoder": reversed_}, ids, cfg, valid=valid)
    assert np.abs(other - whole).max() > 0.01 * scale, "distances matter"
    cache, parts = jf.init_cache(cfg, 2, LENGTH), []
    for start, stop in ((0, 5), *((t, t + 1) for t in range(5, LENGTH))):
        part, cache = tiny.forward_cached(params, ids[:, start:stop], cfg, cache, valid=valid[:, start:stop])
        parts.append(part)
    found = np.concatenate(parts, axis=1)
    # float32, sums in another order
    assert np.abs(found - whole)[valid].max() < 1e-5 * scale
    assert np.abs(found[0, 3:] - alone[0]).max() < 1e-5 * scale


def test_a_cache_keeps_the_positions_that_are_given():
    params, ids, positions = tiny.drawn(CFG), tiny.tokens(CFG, length=LENGTH), 2 * np.arange(LENGTH)[None]
    whole = np.asarray(forward(params, ids, CFG, positions=positions))[:, -1]
    scale = np.abs(whole).max()
    assert np.abs(forward(params, ids, CFG)[:, -1] - whole).max() > 0.01 * scale
    start = jf.init_cache(CFG, 2, LENGTH)
    _, cache = tiny.forward_cached(params, ids[:, :-1], CFG, start, positions=positions[:, :-1])
    last, _ = tiny.forward_cached(params, ids[:, -1:], CFG, cache, positions=positions[:, -1:])
    assert np.abs(last[:, 0] - whole).max() < 1e-5 * scale  # as above


def test_gradients_reach_every_bucket():
    cfg = CONFIGS["full"]
    batch = tiny.batch(cfg, rows=2, length=LENGTH) | {"weights": np.ones((2, LENGTH), np.float32)}
    grads = jax.jit(jax.grad(lambda params: jf.loss(params, batch, cfg)[0]))(tiny.drawn(cfg))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    assert np.abs(grads["decoder"]["position"]["table"]).min() > 1e-7
