"""Positions: sinusoids, learned tables and their ends, RoPE in both layouts, in bfloat16 and far out, score biases."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxformer as jf
from jaxformer.config.components import Component

pytestmark = pytest.mark.usefixtures("quick_compilation")
H = 8


def draw(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def test_sinusoids_are_the_formula():
    positions = np.array([[0, 1, 2], [50, 999, 5000]])
    found = jf.position.sinusoids(jnp.asarray(positions), 6)
    assert found.dtype == jnp.float32 and found.shape == (2, 3, 6)
    for at, p in np.ndenumerate(positions):
        for i in range(3):
            angle = p / 10_000 ** (2 * i / 6)
            # float32 angles up to 5,000 are known to 5,000 · 2^-23 (the frequency and the product are rounded)
            np.testing.assert_allclose(found[at][2 * i : 2 * i + 2], [np.sin(angle), np.cos(angle)], atol=6e-4)
    np.testing.assert_allclose(found[0, 1], [f(10_000 ** (-i / 3)) for i in range(3) for f in (np.sin, np.cos)], atol=1e-6)


def test_sinusoids_are_added_once_to_the_scaled_embedding():
    cfg = tiny.PRESETS["decoder_2017"]
    params, ids = tiny.drawn(cfg), tiny.tokens(cfg, length=4)
    embedded = jf.model.embed(params, jnp.asarray(ids), cfg)
    np.testing.assert_allclose(embedded, np.sqrt(cfg.d_model) * np.asarray(params["embedding"]["token"])[ids], rtol=1e-6)
    placed = jf.position.apply({}, embedded, jnp.arange(4)[None], cfg)
    np.testing.assert_allclose(
        placed - embedded, np.broadcast_to(jf.position.sinusoids(jnp.arange(4), 32), (2, 4, 32)), atol=1e-6
    )


def test_sinusoids_by_halves():
    """Marian's order: all sines, then all cosines."""
    cfg = jf.ModelConfig(vocab_size=5, d_model=4, n_layers=1, n_heads=1, position="sinusoidal_half")
    assert jf.position.spec(cfg) == {}
    positions, x = np.array([[0, 1, 100]]), draw(2, 3, 4)
    found = jf.position.apply({}, x, positions, cfg) - x
    expected = [[0, 0, 1, 1], [0.84147098, 0.00999983, 0.54030231, 0.99995], [-0.50636564, 0.84147098, 0.86231887, 0.54030231]]
    # float32 sums of numbers of size 1; an angle of 100 is known to 8e-6
    np.testing.assert_allclose(found, np.broadcast_to(expected, (2, 3, 4)), atol=1e-5)
    np.testing.assert_allclose(found[0], jf.position.sinusoids(positions[0], 4)[:, [0, 2, 1, 3]], atol=1e-6)
    low = jf.position.apply({}, jnp.zeros((1, 2, 4), "bfloat16"), np.array([[256, 257]]), cfg)  # one number in bfloat16
    assert low.dtype == "bfloat16" and np.abs(low[0, 0, 0] - low[0, 1, 0]) > 0.3


def test_learned_rows_are_added():
    cfg = tiny.PRESETS["gpt2"]
    table = tiny.drawn(cfg)["decoder"]["position"]["table"]
    assert table.shape == (cfg.max_length, cfg.d_model)
    positions = np.array([[3, 0, 23]])
    x = draw(2, 3, cfg.d_model)
    np.testing.assert_array_equal(jf.position.apply({"table": table}, x, positions, cfg), x + table[positions])


def test_the_last_row_of_a_learned_table_works_and_the_next_is_refused():
    cfg = dataclasses.replace(tiny.PRESETS["gpt2"], n_layers=1, max_length=6)
    params, ids = tiny.drawn(cfg), tiny.tokens(cfg, batch=1, length=7)
    assert np.isfinite(jf.forward(params, ids[:, :6], cfg)).all()
    with pytest.raises(ValueError, match="length 7 goes past the learned table of max_length=6"):
        jf.forward(params, ids, cfg)
    with pytest.raises(ValueError, match=r"positions\[0, 2\] = 6 is outside the learned table of max_length=6"):
        jf.forward(params, ids[:, :3], cfg, positions=[[0, 5, 6]])
    with pytest.raises(ValueError, match=r"positions\[0, 0\] = -1 is outside"):
        jf.forward(params, ids[:, :3], cfg, positions=[[-1, 0, 1]])


def test_under_jit_a_position_outside_the_learned_table_is_nan_not_the_last_row():
    cfg = dataclasses.replace(tiny.PRESETS["gpt2"], n_layers=1, max_length=6)
    params, ids = tiny.drawn(cfg), tiny.tokens(cfg, length=3)
    run = jax.jit(lambda positions: jf.forward(params, ids, cfg, positions=positions))
    for outside in (6, -1):
        logits = run(np.array([[0, 4, 5], [0, 5, outside]]))
        assert np.isfinite(logits[0]).all() and np.isnan(logits[1, 2]).all()
    with pytest.raises(ValueError, match="length 7 goes past"):  # lengths are known even inside jit
        jax.jit(lambda ids: jf.forward(params, ids, cfg))(tiny.tokens(cfg, batch=1, length=7))


@pytest.mark.parametrize(("layout", "pairs"), [("interleaved", [(0, 1), (2, 3)]), ("half", [(0, 2), (1, 3)])])
def test_rotate_is_a_complex_product_for_each_pair(layout, pairs):
    x, angle = draw(5, 4), draw(5, 2, seed=1)
    found = np.asarray(jf.rope.rotate(x, angle, layout))
    for i, (a, b) in enumerate(pairs):
        expected = (np.asarray(x)[:, a] + 1j * np.asarray(x)[:, b]) * np.exp(1j * np.asarray(angle)[:, i])
        np.testing.assert_allclose(found[:, a] + 1j * found[:, b], expected, atol=1e-6)  # two float32 products and a sum


def test_frequencies():
    # base^(-2i/H) for H = 8: exact powers of ten
    np.testing.assert_allclose(jf.position.angles(jnp.array(1), 8, 10_000.0), [1, 0.1, 0.01, 0.001], rtol=1e-6)
    np.testing.assert_allclose(jf.position.angles(jnp.array(3), 4, 100.0), [3, 0.3], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_angles_are_float32_for_a_model_of_any_dtype(dtype):
    """256 and 257 are one number in bfloat16."""
    cfg = dataclasses.replace(tiny.PRESETS["llama_mha"], dtype=dtype)
    x = jnp.ones((1, 1, 2, H), dtype)
    found = jf.position.apply({}, x, jnp.array([[256, 257]]), cfg)
    assert found.dtype == dtype
    angles = np.array([[256], [257]]) / 10_000 ** (np.arange(0, H, 2) / H)
    expected = np.stack([np.cos(angles) - np.sin(angles), np.cos(angles) + np.sin(angles)], axis=-1).reshape(2, H)
    # entries are at most sqrt(2), rounded once; an angle of 257 is known to 3e-5 in float32
    np.testing.assert_allclose(np.asarray(found[0, 0], np.float32), expected, atol=float(jnp.finfo(dtype).eps) + 5e-5)
    assert np.abs(expected[0] - expected[1]).max() > 0.5


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_depend_on_the_distance_alone_even_far_out(layout, dtype):
    cfg = dataclasses.replace(tiny.PRESETS["llama_mha"], rope_layout=layout, dtype=dtype)
    q, k = draw(1, 1, 64, H, dtype=dtype), draw(1, 1, 64, H, seed=1, dtype=dtype)

    def scores(query_position, key_position):
        at = lambda p: jnp.full((1, 64), p)
        rotated = [jf.position.apply({}, x, at(p), cfg) for x, p in ((q, query_position), (k, key_position))]
        return np.einsum("...h,...h->...", *(np.asarray(x, np.float32) for x in rotated)) / np.sqrt(H)

    assert np.abs(scores(5, 3) - scores(5, 4)).max() > 0.5
    # float32: an angle near 8,000 is known to 5e-4, and scores have size 1. bfloat16: every entry is rounded by 2^-9, and
    # the sum of 8 products over sqrt(8) by 2^-9 times about sqrt(2)
    np.testing.assert_allclose(scores(8005, 8003), scores(5, 3), atol=1e-2)


@pytest.mark.parametrize("name", ["llama_gqa", "qwen3", "mixed_windows"])
def test_a_bfloat16_model_gives_the_same_far_out(name):
    """Shifting all positions changes how each rotated query and key is rounded, and nothing else: the shifted logits are as
    near to the float32 model's as the unshifted ones are."""
    cfg = dataclasses.replace(tiny.PRESETS[name], scan=True)
    params, ids = tiny.drawn(cfg), tiny.tokens(cfg, batch=4, length=9)

    def logits(dtype, offset):
        run = jax.jit(lambda p: jf.forward(params, ids, dataclasses.replace(cfg, dtype=dtype), positions=p))
        return np.asarray(run(np.arange(9)[None] + offset))

    exact = logits("float32", 0)
    rounded, shifted = (np.abs(logits("bfloat16", offset) - exact) for offset in (0, 8000))
    assert rounded.max() > 1e-3
    assert (rounded != shifted).any()
    root = lambda x: np.sqrt((x * x).mean())
    assert root(shifted) < 1.5 * root(rounded)  # by chance they differ by 15%; a wrong angle gives 20 times as much


@pytest.mark.parametrize("name", ["llama_mha", "mixed_windows"])
def test_only_distances_count_in_the_whole_model(name):
    """Queries and keys are rotated, values are not: a shift of all positions changes no output, another distance does."""
    cfg = dataclasses.replace(tiny.PRESETS[name], scan=True)
    params, ids = tiny.drawn(cfg), tiny.tokens(cfg, length=6)
    run = jax.jit(lambda positions: jf.forward(params, ids, cfg, positions=positions))
    plain = run(np.arange(6)[None])
    np.testing.assert_allclose(run(np.arange(6)[None] + 40), plain, rtol=1e-4, atol=1e-4)  # angles near 40 known to 4e-6
    assert np.abs(run(2 * np.arange(6)[None]) - plain).max() > 0.01


INTERLEAVED_FROM_HALF = np.arange(H).reshape(2, H // 2).T.ravel()  # (i, i + H/2) side by side: 0 4 1 5 2 6 3 7


def test_interleaved_equals_half_split_after_a_permutation():
    cfg = tiny.PRESETS["llama_mha"]
    q, k = draw(1, 1, 30, H), draw(1, 1, 30, H, seed=1)
    positions = np.arange(30)[None]

    def scores(layout, q, k):
        chosen = dataclasses.replace(cfg, rope_layout=layout)
        q, k = (jf.position.apply({}, x, positions, chosen) for x in (q, k))
        return np.einsum("...th,...sh->...ts", q, k)

    half = scores("half", q, k)
    assert np.abs(scores("interleaved", q, k) - half).max() > 1
    order = INTERLEAVED_FROM_HALF
    np.testing.assert_allclose(scores("interleaved", q[..., order], k[..., order]), half, atol=1e-5)


@pytest.mark.parametrize("name", ["llama_gqa", "qwen2_5", "qwen3"])
def test_a_half_split_model_becomes_interleaved_by_permuting_q_and_k(name):
    """Kernels, biases and QK-norm gains of queries and keys; never those of values and outputs."""
    half = dataclasses.replace(tiny.PRESETS[name], rope_layout="half", head_dim=H, scan=True)
    interleaved = dataclasses.replace(half, rope_layout="interleaved")
    params, ids = tiny.drawn(half), tiny.tokens(half, length=9)
    attention = dict(params["decoder"]["layers"]["attention"])
    for part in ("query", "key"):
        moved = [part, f"{part}_bias", f"{part}_norm"]
        attention |= {n: jax.tree.map(lambda w: w[..., INTERLEAVED_FROM_HALF], attention[n]) for n in moved if n in attention}
    layers = params["decoder"]["layers"] | {"attention": attention}
    permuted = params | {"decoder": params["decoder"] | {"layers": layers}}
    run = lambda cfg, params: jax.jit(lambda p: jf.forward(p, ids, cfg))(params)
    expected = run(half, params)
    assert np.abs(run(interleaved, params) - expected).max() > 0.01
    np.testing.assert_allclose(run(interleaved, permuted), expected, rtol=1e-5, atol=1e-5)  # the same products, reordered


def test_no_positions_means_that_nothing_depends_on_them():
    cfg = dataclasses.replace(tiny.PRESETS["llama_mha"], position="none", n_layers=1, causal=False)
    assert jf.position.spec(cfg) == {}
    params, ids = tiny.drawn(cfg), tiny.tokens(cfg, length=5)
    run = jax.jit(lambda ids, positions: jf.forward(params, ids, cfg, positions=positions))
    plain = run(ids, np.arange(5)[None])
    np.testing.assert_array_equal(run(ids, 7 * np.arange(5)[None]), plain)
    np.testing.assert_allclose(run(ids[:, ::-1], np.arange(5)[None])[:, ::-1], plain, rtol=1e-5, atol=1e-5)  # sums reordered


SLOPES = np.array([[0.5], [0.25]], np.float32)  # [K, G]
ALIBI = Component(
    lambda cfg: {},
    lambda params, at, cfg: SLOPES[None, ..., None, None] * (at[1][:, None, :] - at[0][:, :, None])[:, None, None],
    site="scores",
)


def test_a_score_bias_is_added_to_the_scaled_scores():
    cfg = jf.ModelConfig(vocab_size=5, d_model=8, n_layers=1, n_heads=2, position=ALIBI)
    spec = jf.attention.spec(cfg)
    params = {name: draw(*param.shape(cfg), seed=i) for i, (name, param) in enumerate(spec.items())}
    x = draw(1, 5, 8, seed=9)
    run = jf.capture(lambda x, cfg: jf.attention.apply(params, x, cfg), "weights")
    (_, biased), (_, plain) = run(x, cfg), run(x, dataclasses.replace(cfg, position="none"))
    distance = np.arange(5)[None, :] - np.arange(5)[:, None]
    expected = np.asarray(plain["weights"]) * np.exp(SLOPES[None, ..., None, None] * distance)
    expected /= expected.sum(-1, keepdims=True)
    assert np.abs(expected - plain["weights"]).max() > 0.05
    np.testing.assert_allclose(biased["weights"], expected, rtol=1e-5, atol=1e-6)
