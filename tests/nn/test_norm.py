"""LayerNorm and RMSNorm: the formulas, float32 statistics, dtypes, and one token at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf

pytestmark = pytest.mark.usefixtures("quick_compilation")
D = 16
CFG = {name: jf.ModelConfig(vocab_size=5, d_model=D, n_layers=1, n_heads=1, norm=name) for name in ("layer", "rms")}


def drawn(name, dtype="float32", seed=0):
    """Gains and biases that are not 1 and 0, in float32 as a model keeps them, and an input."""
    rng = np.random.default_rng(seed)
    params = {"gain": 1 + 0.5 * rng.standard_normal(D)} | ({"bias": rng.standard_normal(D)} if name == "layer" else {})
    x = 3 * rng.standard_normal((2, 5, D)) + 2
    return {key: jnp.asarray(value, jnp.float32) for key, value in params.items()}, jnp.asarray(x, dtype)


def formula(params, x, name, eps=1e-5):
    params, x = jax.tree.map(lambda a: np.asarray(a, np.float64), (params, x))
    if name == "layer":
        x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * params["gain"] + params.get("bias", 0)


@pytest.mark.parametrize("name", CFG)
def test_formula(name):
    params, x = drawn(name)
    # float32 means of 16 numbers of size 1
    np.testing.assert_allclose(jf.norm.apply(params, x, CFG[name]), formula(params, x, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CFG)
def test_epsilon_stands_inside_the_root(name):
    """For entries far below sqrt(eps) the result is x / sqrt(eps), not x / eps."""
    params, x = drawn(name)
    x = 1e-4 * x
    cfg = jf.ModelConfig(vocab_size=5, d_model=D, n_layers=1, n_heads=1, norm=name, norm_eps=1e-3)
    found = jf.norm.apply(params, x, cfg)
    np.testing.assert_allclose(found, formula(params, x, name, eps=1e-3), rtol=1e-5, atol=1e-5)
    assert np.abs(found - formula(params, x, name, eps=1e-5)).max() > 1e-2


@pytest.mark.parametrize("name", CFG)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_result_has_the_inputs_dtype_and_float32_statistics(name, dtype):
    params, x = drawn(name)
    x = (x + 100 if name == "layer" else x).astype(dtype)  # a mean of about 102 is known to 0.25 in bfloat16
    y = jf.norm.apply(params, x, CFG[name])
    assert y.dtype == dtype
    # the result, the gain and the product are each rounded to the dtype once, and entries are below 8; a float32 mean of
    # about 102 is known to 1e-5
    eps = float(jnp.finfo(dtype).eps)
    exact = formula(params, x, name)
    assert np.abs(exact).max() < 8
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2 * eps + 1e-5, atol=eps + 1e-5)


@pytest.mark.parametrize("name", CFG)
def test_squares_do_not_overflow_float16(name):
    params, x = drawn(name)
    large = (300 * x).astype(jnp.float16)  # up to 3,000: squares are past float16's 65,504
    assert np.isinf((large * large).max())
    found = np.asarray(jf.norm.apply(params, large, CFG[name]), np.float64)
    np.testing.assert_allclose(found, formula(params, large, name), rtol=2e-3, atol=1e-3)  # roundings to float16


def test_layer_norm_of_a_small_spread_far_from_zero():
    """E[x²] − E[x]² would cancel: at 1,000 its float32 rounding is 0.06, more than the variance."""
    params, x = drawn("layer")
    x = np.float32(1000) + np.float32(0.01) * x
    naive = (x * x).mean(-1) - x.mean(-1) ** 2
    assert np.abs(naive / np.var(np.asarray(x, np.float64), -1) - 1).max() > 0.5
    # the mean of 16 numbers near 1,000 is known to 6e-5, a fifth of a percent of their spread of 0.03
    np.testing.assert_allclose(jf.norm.apply(params, x, CFG["layer"]), formula(params, x, "layer"), rtol=0.02, atol=0.02)


def test_rms_gain_is_multiplied_after_the_cast():
    """As LLaMA does: round the normalised input to bfloat16, then multiply in bfloat16."""
    params, x = drawn("rms", "bfloat16")
    gain = params["gain"]
    x32 = np.asarray(x, np.float32)
    normed = jnp.asarray(x32 / np.sqrt((x32 * x32).mean(-1, keepdims=True) + np.float32(1e-5)))
    after = normed.astype(jnp.bfloat16) * gain.astype(jnp.bfloat16)
    before = (normed * gain).astype(jnp.bfloat16)
    found = jf.norm.apply(params, x, CFG["rms"])
    assert (after != before).mean() > 0.1
    # rsqrt and 1 / sqrt may differ in the last bit of float32, which rarely moves a rounding to bfloat16
    assert (found == after).mean() > 0.98


@pytest.mark.parametrize("name", CFG)
def test_no_statistic_crosses_tokens_or_rows(name):
    params, x = drawn(name)
    alone = jf.norm.apply(params, x[1:, 2:3], CFG[name])
    np.testing.assert_allclose(jf.norm.apply(params, x, CFG[name])[1:, 2:3], alone, rtol=1e-6, atol=1e-6)  # same sums
    others = jax.grad(lambda x: (jf.norm.apply(params, x, CFG[name])[1, 2] ** 2).sum())(x)
    assert (np.abs(others).sum(-1) > 0).nonzero()[0].tolist() == [1]
    assert (np.abs(others).sum(-1) > 0).nonzero()[1].tolist() == [2]


@pytest.mark.parametrize("name", CFG)
@pytest.mark.parametrize("value", [0.0, 7.0])
def test_a_constant_token_stays_finite(name, value):
    params, _ = drawn(name)
    x = jnp.full((1, 1, D), value)
    y, back = jax.vjp(lambda x: jf.norm.apply(params, x, CFG[name]), x)
    assert np.isfinite(y).all() and np.isfinite(back(jnp.ones_like(y))[0]).all()
    if name == "layer":
        np.testing.assert_array_equal(y[0, 0], params["bias"])


@pytest.mark.parametrize("name", CFG)
def test_gradient_by_finite_differences(name):
    params, x = drawn(name)
    direction = np.random.default_rng(5).standard_normal(x.shape)
    weight = np.random.default_rng(6).standard_normal(x.shape)
    gradient = jax.grad(lambda x: (jf.norm.apply(params, x, CFG[name]) * weight).sum())(x)
    step = 1e-5
    up, down = (formula(params, np.asarray(x, np.float64) + sign * step * direction, name) for sign in (1, -1))
    expected = ((up - down) * weight).sum() / (2 * step)
    assert abs(expected) > 0.1
    # float32 sums of 160 terms of size 1
    np.testing.assert_allclose((np.asarray(gradient) * direction).sum(), expected, rtol=1e-4, atol=1e-4)


def test_layer_has_a_bias_and_rms_has_not():
    assert set(jf.norm.spec(CFG["layer"])) == {"gain", "bias"}
    assert set(jf.norm.spec(CFG["rms"])) == {"gain"}
