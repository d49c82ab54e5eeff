"""Attention by itself: who is seen, rows that see nothing, windows, shared key/value heads, soft-cap, cached chunks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxformer as jf
from jaxformer.nn.attend import attend
from jaxformer.nn.mask import TokenInfo, arange, visible

pytestmark = pytest.mark.usefixtures("quick_compilation")
# float32 sums of at most 40 terms of size 1: 40 · 2^-24 is 2e-6
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def draw(*shapes, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def naive(q, k, v, mask, softcap=None):
    """Attention of one head in float64, a query at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros((len(q), v.shape[1]))
    for i, row in enumerate(mask):
        scores = [q[i] @ k[j] / np.sqrt(q.shape[1]) for j in np.flatnonzero(row)]
        if softcap is not None:
            scores = softcap * np.tanh(np.array(scores) / softcap)
        if row.any():
            weights = np.exp(scores) / np.exp(scores).sum()
            out[i] = weights @ v[row]
    return out


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 6), (1, 6)])
def test_attend_is_the_formula(softcap, queries, keys):
    q, k, v = draw((2, 2, 3, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8))
    mask = np.random.default_rng(1).random((2, queries, keys)) < 0.5
    mask[0, -1], mask[1, 0] = True, False  # whatever was drawn: a row that sees all and one that sees nothing
    out = attend(q, k, v, mask, softcap=softcap)
    for b, kv, g in np.ndindex(2, 2, 3):
        np.testing.assert_allclose(out[b, kv, g], naive(q[b, kv, g], k[b, kv], v[b, kv], mask[b], softcap), **CLOSE)


def test_softcap_bounds_scores_before_the_mask():
    q, k, v = draw((1, 1, 1, 4, 8), (1, 1, 4, 8), (1, 1, 4, 8))
    mask = np.tril(np.ones((1, 4, 4), bool))
    seen = {}

    def weights(softcap):
        attend(100 * q, k, v, mask, softcap=softcap, observe=lambda w: seen.setdefault(softcap, w))
        return seen[softcap][0, 0, 0]

    assert np.abs(weights(None) - weights(2.0)).max() > 0.1
    assert (weights(2.0)[~mask[0]] == 0).all()
    # scores lie within [-2, 2], so no two visible weights differ by more than exp(4)
    for row, count in zip(weights(2.0), range(1, 5), strict=True):
        assert row[:count].max() / row[:count].min() <= np.exp(4) * (1 + 1e-5)


def test_logit_softcap():
    cfg = tiny.PRESETS["llama_gqa"]
    params, (hidden,) = tiny.drawn(cfg), draw((2, 3, cfg.d_model))
    raw = np.asarray(jf.model.head(params, 3 * hidden, cfg))
    assert np.abs(raw).max() > 4
    capped = jf.model.head(params, 3 * hidden, dataclasses.replace(cfg, logit_softcap=3.0))
    np.testing.assert_allclose(capped, 3 * np.tanh(raw / 3), **CLOSE)


def test_a_bias_may_hide_every_key_too():
    """A score component that masks by −inf: with or without another mask the row is zero, not NaN."""
    q, k, v = draw((1, 1, 1, 2, 4), (1, 1, 3, 4), (1, 1, 3, 4))
    bias = jnp.array([[-jnp.inf, -jnp.inf, -jnp.inf], [0.0, -jnp.inf, -jnp.inf]])[None, None, None]
    for mask in (np.ones((1, 2, 3), bool), None):
        out, back = jax.vjp(lambda q, k, v, mask=mask: attend(q, k, v, mask, bias=bias), q, k, v)
        np.testing.assert_array_equal(out[0, 0, 0], [np.zeros(4), v[0, 0, 0]])
        assert all(np.isfinite(gradient).all() for gradient in back(jnp.ones_like(out)))


MASK = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0]], bool)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("how", ["plain", "softcap", "bias", "large"])
def test_a_row_that_sees_nothing_is_zero_with_finite_gradients(dtype, how):
    q, k, v, bias = draw((1, 1, 1, 3, 4), (1, 1, 3, 4), (1, 1, 3, 4), (1, 1, 1, 3, 3), dtype=dtype)
    q = 200 * q if how == "large" else q
    given = {"softcap": {"softcap": 1.0}, "bias": {"bias": bias}}.get(how, {})
    out, back = jax.vjp(lambda q, k, v: attend(q, k, v, MASK[None], **given), q, k, v)
    dq, dk, dv = (np.asarray(d[0, 0], np.float32) for d in back(jnp.ones_like(out)))
    assert out.dtype == dtype
    assert (out[0, 0, 0, 0] == 0).all()
    assert (out[0, 0, 0, 1] == v[0, 0, 0]).all()
    for gradient in (dq, dk, dv):
        assert np.isfinite(gradient).all()
    assert (dq[0, 0] == 0).all() and (dk[2] == 0).all() and (dv[2] == 0).all()
    # Each row that sees something hands its whole cotangent of 1 to the values; two roundings to the dtype
    np.testing.assert_allclose(dv.sum(0), 2.0, rtol=2 * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_a_row_of_padding_only_harms_nothing(name):
    cfg = dataclasses.replace(tiny.PRESETS[name], n_layers=1)
    params, ids = tiny.drawn(cfg), tiny.tokens(cfg, length=5)

    @jax.jit
    def run(params, ids, valid):
        logits = lambda p: jf.forward(p, ids, cfg, valid=valid)
        return logits(params), jax.grad(lambda p: (logits(p) ** 2).sum())(params)

    real = np.ones((2, 5), bool)
    logits, grads = run(params, ids, real & [[True], [False]])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((logits, grads)))
    both_real, _ = run(params, ids, real)
    assert np.abs(logits - both_real)[1].max() > 0.1
    np.testing.assert_allclose(logits[0], both_real[0], **CLOSE)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_visible_by_brute_force(causal, window):
    rng = np.random.default_rng(0)
    query = TokenInfo(np.arange(3, 7)[None], None, rng.integers(1, 3, (2, 4)))
    key = TokenInfo(np.arange(8)[None], None, rng.integers(1, 3, (2, 8)), rng.random((2, 8)) < 0.7)
    mask = visible(query, key, causal=causal, window=window)
    assert mask.dtype == bool and mask.shape == (2, 4, 8)
    for b, i, j in np.ndindex(2, 4, 8):
        expected = query.segment[b, i] == key.segment[b, j] and key.valid[b, j]
        distance = i + 3 - j
        expected &= not causal or distance >= 0
        expected &= window is None or abs(distance) < window
        assert mask[b, i, j] == expected


def test_nothing_to_hide_is_no_mask():
    assert visible(arange(3), arange(5), causal=False) is None


@pytest.mark.parametrize(
    ("window", "counts"), [(1, [1] * 6), (3, [1, 2, 3, 3, 3, 3]), (6, [1, 2, 3, 4, 5, 6]), (9, [1, 2, 3, 4, 5, 6])]
)
def test_a_window_counts_the_query_itself(window, counts):
    mask = visible(arange(6), arange(6), causal=True, window=window)
    assert mask[0].sum(1).tolist() == counts
    full = visible(arange(6), arange(6), causal=True)
    assert (mask == full).all() == (window >= 6)


def one_head(width, **fields):
    """Attention of one head whose value and output projections are the identity: what it returns is a mean of inputs."""
    cfg = jf.ModelConfig(vocab_size=5, d_model=width, n_layers=1, n_heads=1, **fields)
    query, key = draw((width, 1, 1, width), (width, 1, width))
    eye = jnp.eye(width)
    return cfg, {"query": query, "key": key, "value": eye[:, None], "out": eye[None, None]}


def test_a_window_of_one_returns_the_value_itself():
    cfg, params = one_head(4, window=1)
    (x,) = draw((2, 6, 4), seed=1)
    assert (jf.attention.apply(params, x, cfg)[0] == x).all()
    wider, _ = jf.attention.apply(params, x, dataclasses.replace(cfg, window=2))
    assert np.abs(wider - x).max() > 0.1


@pytest.mark.parametrize("cached", [False, True])
def test_windows_count_in_every_layer_and_in_cached_chunks(cached):
    cfg = dataclasses.replace(tiny.PRESETS["mixed_windows"], window=(3, None, 1))
    params, ids = tiny.drawn(cfg), tiny.tokens(cfg, batch=1, length=6)
    run = jax.jit(jf.capture(lambda ids, cache: jf.apply(params, ids, cfg, cache=cache), "*attention.weights"))
    cache = jf.init_cache(cfg, 1, 8) if cached else None
    counts = {0: [], 1: [], 2: []}
    for chunk in [ids[:, :2], ids[:, 2:4], ids[:, 4:5], ids[:, 5:]] if cached else [ids]:
        out, seen = run(chunk, cache)
        cache = out.cache
        assert (cache is not None) == cached
        for layer, found in counts.items():
            found += (seen[f"decoder.{layer}.attention.weights"] > 0).sum(-1)[0, 0, 0].tolist()
    assert counts == {0: [1, 2, 3, 3, 3, 3], 1: [1, 2, 3, 4, 5, 6], 2: [1] * 6}


def test_query_head_reads_its_groups_key_value_head():
    cfg = jf.ModelConfig(
        vocab_size=5, d_model=4, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=1, qkv_bias=True, position="none"
    )
    query, key, x = draw((4, 2, 2, 1), (4, 2, 1), (1, 3, 4))
    params = {
        **{"query": query, "key": key, "value": jnp.zeros((4, 2, 1)), "out": jnp.eye(4).reshape(2, 2, 1, 4)},
        **{"query_bias": jnp.zeros((2, 2, 1)), "key_bias": jnp.zeros((2, 1)), "value_bias": jnp.array([[1.0], [2.0]])},
    }
    out, back = jax.vjp(jax.jit(lambda p: jf.attention.apply(p, x, cfg)[0]), params)
    # a softmax sums to 1 up to rounding
    np.testing.assert_allclose(out[0], [[1, 1, 2, 2]] * 3, rtol=1e-6)
    (grads,) = back(jnp.ones_like(out) * jnp.array([1.0, 1.0, 0.0, 0.0]))  # of the first two query heads
    np.testing.assert_allclose(grads["value_bias"], [[6.0], [0.0]], rtol=1e-6)
    assert (grads["value"][:, 1] == 0).all() and (grads["value"][:, 0] != 0).all()


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="n_heads=4 is not divisible by n_kv_heads=3"):
        jf.ModelConfig(vocab_size=5, d_model=8, n_layers=1, n_heads=4, n_kv_heads=3)


CHUNKS = {
    "transformer_base": [[2, 2, 1, 1]],  # the source comes with the first chunk only
    "gpt2": [[1] * 6, [2, 2, 1, 1], [5, 1]],
    "qwen3": [[1] * 6, [2, 2, 1, 1], [5, 1]],
    "mistral": [[1] * 6, [2, 2, 1, 1], [5, 1]],
}


@pytest.mark.parametrize("name", CHUNKS)
def test_full_forward_is_prefill_and_steps(name):
    """Prompts of 1, 2 and n − 1 tokens, a chunk in the middle, a cache longer than the sequence."""
    cfg = dataclasses.replace(tiny.PRESETS[name], n_layers=2, encoder_layers=min(1, tiny.PRESETS[name].encoder_layers))
    params, ids, given = tiny.drawn(cfg), tiny.tokens(cfg, length=6), tiny.inputs(cfg)
    run = jax.jit(lambda params, ids, cache, given: jf.forward_cached(params, ids, cfg, cache, **given))
    whole = jax.jit(lambda params, ids, given: jf.forward(params, ids, cfg, **given))(params, ids, given)
    assert np.abs(whole[:, 1:] - whole[:, :-1]).max() > 0.1
    for chunks in CHUNKS[name]:
        cache, start, parts = jf.init_cache(cfg, 2, 9), 0, []
        for length in chunks:
            logits, cache = run(params, ids[:, start : start + length], cache, {} if start else given)
            parts.append(logits)
            start += length
        # float32 with sums in another order, through two layers
        np.testing.assert_allclose(np.concatenate(parts, 1), whole, **CLOSE)
