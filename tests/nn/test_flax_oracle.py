"""Flax linen's own layers as an independent oracle: values and gradients, parameters mapped by hand."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf

pytestmark = pytest.mark.usefixtures("quick_compilation")
B, T, S, D, N, H, V = 2, 6, 4, 16, 4, 4, 11
CFG = jf.ModelConfig(
    vocab_size=V, d_model=D, n_layers=1, n_heads=N, position="none", qkv_bias=True, out_bias=True, tied_head=True
)
# two float32 programs that add up to 64 products of size 1 in different orders
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), jnp.float32)


def same(ours, theirs, params, *inputs, idle=()):
    """Asserts that two functions of (params, *inputs) agree in value and in every gradient of a random projection.

    idle: parameters whose gradient is zero.
    """

    @jax.jit
    def both(params, *inputs):
        pairs = [jax.vjp(f, params, *inputs) for f in (ours, theirs)]
        return [(out, back(normal(*out.shape, seed=9))) for out, back in pairs]

    found, expected = both(params, *inputs)
    for path, leaf in jax.tree.leaves_with_path(expected):
        assert any(name in jax.tree_util.keystr(path) for name in idle) or np.abs(leaf).max() > 1e-2, path
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), found, expected)


@pytest.mark.parametrize("eps", [1e-5, 1e-1])
def test_layer_norm(eps):
    cfg = jf.ModelConfig(vocab_size=V, d_model=D, n_layers=1, n_heads=N, norm="layer", norm_eps=eps)
    flax = nn.LayerNorm(epsilon=eps, use_fast_variance=False)
    same(
        lambda p, x: jf.norm.apply(p, x, cfg),
        lambda p, x: flax.apply({"params": {"scale": p["gain"], "bias": p["bias"]}}, x),
        {"gain": normal(D), "bias": normal(D, seed=1)},
        2 * normal(B, T, D) + 1,
    )


@pytest.mark.parametrize("eps", [1e-5, 1e-1])
def test_rms_norm(eps):
    cfg = jf.ModelConfig(vocab_size=V, d_model=D, n_layers=1, n_heads=N, norm="rms", norm_eps=eps)
    flax = nn.RMSNorm(epsilon=eps)
    same(
        lambda p, x: jf.norm.apply(p, x, cfg),
        lambda p, x: flax.apply({"params": {"scale": p["gain"]}}, x),
        {"gain": normal(D)},
        2 * normal(B, T, D) + 1,
    )


IDLE = ("key_bias",)  # adds the same to all scores of a query, which softmax ignores


def attention_params():
    std = D**-0.5
    params = {name: std * normal(D, N, 1, H, seed=i) for i, name in enumerate(("query", "key", "value"))}
    params |= {f"{name}_bias": normal(N, 1, H, seed=10 + i) for i, name in enumerate(("query", "key", "value"))}
    for name in ("key", "key_bias", "value", "value_bias"):
        params[name] = params[name].squeeze(-2)  # [.., K, H]
    return params | {"out": std * normal(N, 1, H, D), "out_bias": normal(D)}


def flax_attention(params, x_q, x_kv, mask):
    """Flax's names and shapes: kernels [D, N, H] and [N, H, D], biases [N, H] and [D]."""

    def projection(name):
        return {"kernel": params[name].reshape(D, N, H), "bias": params[f"{name}_bias"].reshape(N, H)}

    mapped = {name: projection(name) for name in ("query", "key", "value")}
    mapped["out"] = {"kernel": params["out"].reshape(N, H, D), "bias": params["out_bias"]}
    layer = nn.MultiHeadDotProductAttention(num_heads=N, qkv_features=N * H, out_features=D)
    return layer.apply({"params": mapped}, x_q, x_kv, mask=mask)


# padding that leaves each causal row at least its first key: Flax spreads a row without keys over all of them
VALID = np.array([[True] * T, [True, True, False, True, False, False]])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_self_attention(causal, padded):
    cfg = dataclasses.replace(CFG, causal=causal)
    info = jf.mask.arange(T).replace(valid=VALID if padded else None)
    causal_mask = nn.make_causal_mask(np.ones((B, T))) if causal else None
    padding = nn.make_attention_mask(np.ones((B, T)), VALID) if padded else None
    same(
        lambda p, x: jf.attention.apply(p, x, cfg, info=info)[0],
        lambda p, x: flax_attention(p, x, x, nn.combine_masks(causal_mask, padding)),
        attention_params(),
        normal(B, T, D),
        idle=IDLE,
    )


@pytest.mark.parametrize("padded", [True, False])
def test_cross_attention(padded):
    """Queries from one sequence, keys and values from another of another length; no causality."""
    valid = VALID[:, :S] if padded else None
    info = jf.mask.arange(S).replace(valid=valid)

    def ours(p, x, source):
        return jf.attention.apply(p, x, CFG, cross_attention_kv=jf.attention.key_value(p, source, CFG, info))[0]

    mask = nn.make_attention_mask(np.ones((B, T)), valid) if padded else None
    theirs = lambda p, x, source: flax_attention(p, x, source, mask)
    same(ours, theirs, attention_params(), normal(B, T, D), normal(B, S, D), idle=IDLE)


def test_embedding():
    ids = np.random.default_rng(0).integers(0, V, (B, T))
    flax = nn.Embed(V, D)
    same(
        lambda p: jf.model.embed({"embedding": {"token": p}}, ids, CFG),
        lambda p: flax.apply({"params": {"embedding": p}}, ids),
        normal(V, D),
    )


def test_tied_head():
    flax = nn.Embed(V, D)
    same(
        lambda p, x: jf.model.head({"embedding": {"token": p}}, x, CFG),
        lambda p, x: flax.apply({"params": {"embedding": p}}, x, method="attend"),
        normal(V, D),
        normal(B, T, D),
    )
