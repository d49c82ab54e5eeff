"""Latent attention: both of its forms, and what a cache keeps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxformer as jf
from jaxformer.config import Experts, Latent
from jaxformer.nn import cache_spec, latent

pytestmark = pytest.mark.usefixtures("quick_compilation")
LATENT = Latent(rank=12, query_rank=10, rope_dim=4, value_dim=6)


def model(own=LATENT, **fields):
    sizes = {"vocab_size": 40, "d_model": 16, "n_layers": 2, "n_heads": 3, "head_dim": 8, "max_length": 64}
    return jf.presets.llama(**sizes | fields, attention="latent", latent=own)


def by_hand(params, x, cfg):
    """One sequence [T, D], head by head, as the paper's equations 9 to 19 and 37 to 47 have it."""

    def rms(x, gain):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg.latent.norm_eps) * gain

    def turn(x):  # [T, rope_dim], adjacent pairs
        width = x.shape[-1]
        angle = np.arange(len(x))[:, None] * cfg.rope_theta ** (-np.arange(0, width, 2) / width)
        pairs = (x[:, 0::2] + 1j * x[:, 1::2]) * np.exp(1j * angle)
        return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)

    p = jax.tree.map(np.asarray, params)
    c_kv = rms(x @ p["latent"], p["latent_norm"]["gain"])
    k_rope = turn(x @ p["key_rope"])
    c_q = rms(x @ p["query_down"], p["query_norm"]["gain"]) if "query_down" in p else x
    out = np.zeros_like(x)
    for head in range(cfg.n_heads):
        q, kv = c_q @ p["query"][:, head], c_kv @ p["key_value"][:, head]
        q, q_rope, k, v = q[:, : cfg.head_dim], turn(q[:, cfg.head_dim :]), kv[:, : cfg.head_dim], kv[:, cfg.head_dim :]
        scores = (q @ k.T + q_rope @ k_rope.T) / np.sqrt(cfg.head_dim + cfg.latent.rope_dim)
        scores = np.where(np.tril(np.ones_like(scores)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = out + weights / weights.sum(-1, keepdims=True) @ v @ p["out"][head]
    return out


@pytest.mark.parametrize("query_rank", [0, 10])
def test_it_is_what_the_paper_says(query_rank):
    cfg = model(dataclasses.replace(LATENT, query_rank=query_rank))
    layer = jax.tree.map(lambda p: p[0], tiny.drawn(cfg)["decoder"]["layers"]["attention"])
    assert ("query_down" in layer) == bool(query_rank)
    x = np.random.default_rng(0).normal(size=(7, 16)).astype(np.float32)
    found, _ = jf.attention.apply(layer, jnp.asarray(x)[None], cfg)
    np.testing.assert_allclose(found[0], by_hand(layer, x, cfg), atol=1e-5)  # sums of some dozen products of order 1


@pytest.mark.parametrize("form", ["absorbed", "plain", "chosen"])
@pytest.mark.parametrize("chunks", [[1] * 9, [4, 1, 1, 3], [9]])
def test_every_step_of_a_decode_is_the_whole_forward(form, chunks, monkeypatch):
    if form != "chosen":
        monkeypatch.setattr(latent, "absorbing", lambda *sizes: form == "absorbed")
    cfg = model()
    params, tokens = tiny.drawn(cfg), tiny.tokens(cfg)
    whole = np.asarray(jf.forward(params, tokens, cfg))
    cache, start, out = jf.init_cache(cfg, 2, 12), 0, []
    for length in chunks:
        logits, cache = jf.forward_cached(params, tokens[:, start : start + length], cfg, cache)
        out.append(logits)
        start += length
    assert np.abs(whole).max() > 1
    np.testing.assert_allclose(np.concatenate(out, 1), whole, atol=1e-5)


def test_the_form_with_fewer_products_is_taken():
    big = jf.presets.deepseek_v3()
    assert latent.absorbing(1, 4096, big) and latent.absorbing(8, 4096, big) and not latent.absorbing(512, 4096, big)


def test_a_cache_keeps_the_latent_and_one_rotary_key():
    cfg = model()
    kept = jax.eval_shape(lambda: jf.init_cache(cfg, 2, 12))
    assert {name: leaf.shape for name, leaf in kept.layers[0].items()} == {"latent": (2, 12, 12), "key_rope": (2, 12, 4)}
    big = jf.presets.deepseek_v3()

    def numbers_a_token(cfg):
        sizes = [
            cache_spec.size(jax.eval_shape(lambda: jf.init_cache(cfg, 1, length)))  # noqa: B023
            for length in (64, 128)
        ]
        return (sizes[1] - sizes[0]) / 64 / cfg.n_layers / 2  # bfloat16

    assert numbers_a_token(big) == 512 + 64
    heads = dataclasses.replace(big, attention="grouped", latent=Latent())
    assert numbers_a_token(heads) == 2 * 128 * 128


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"own": Latent()}, "needs latent.rank"),
        ({"n_kv_heads": 1}, "n_kv_heads=n_heads"),
        ({"position": "none"}, "position='rope'"),
        ({"qk_norm": True}, "no|does not support biases, qk_norm"),
        ({"attention_softcap": 5.0}, "attention_softcap"),
        ({"own": dataclasses.replace(LATENT, rope_dim=4), "window": 3, "qkv_bias": True}, "does not support biases"),
    ],
)
def test_what_it_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        model(**fields)
    with pytest.raises(ValueError, match="latent has no effect with attention='grouped'"):
        jf.presets.llama(vocab_size=8, d_model=8, n_layers=1, n_heads=2, latent=LATENT)
    with pytest.raises(ValueError, match="rope_dim=3 is odd"):
        Latent(rank=4, rope_dim=3)


def test_a_window_and_weights_that_can_be_seen():
    cfg = model(window=3)
    params, tokens = tiny.drawn(cfg), tiny.tokens(cfg)
    whole, seen = jf.capture(lambda: jf.forward(params, tokens, cfg), "*.0.attention.weights")()
    (weights,) = seen.values()
    assert weights.shape == (2, 3, 1, 9, 9)
    np.testing.assert_array_equal((np.asarray(weights) > 0).sum(-1)[0, 0, 0], [1, 2, 3, 3, 3, 3, 3, 3, 3])
    cache = jf.init_cache(cfg, 2, 12)
    out = []
    for i in range(9):
        logits, cache = jf.forward_cached(params, tokens[:, i : i + 1], cfg, cache)
        out.append(logits)
    np.testing.assert_allclose(np.concatenate(out, 1), whole, atol=1e-5)


PUBLISHED = [  # total, active for a token, and the digits these are given to
    ("deepseek_v3", 671, 37, 1e9),
    ("mixtral_8x7b", 467, 129, 1e8),
    ("qwen3_moe_30b_a3b", 305, 33, 1e8),
]


@pytest.mark.parametrize(("name", "total", "active", "digit"), PUBLISHED)
def test_published_sizes(name, total, active, digit):
    cfg = getattr(jf.presets, name)()
    spec = jf.model.spec(cfg)
    assert round(jf.spec.count(spec, cfg) / digit) == total
    # Some makers round and some cut digits off, with the input embedding or without: all of that is less than 2%.
    assert abs(jf.spec.active(spec, cfg) / digit / active - 1) < 0.02


def test_active_parameters_by_hand():
    dense = jf.presets.llama2_7b()
    assert jf.spec.active(jf.model.spec(dense), dense) == jf.spec.count(jf.model.spec(dense), dense)
    shared = model(experts=Experts(n_experts=4, per_token=2, d_ff=8, shared=1))
    spec = jf.model.spec(shared)
    assert jf.spec.count(spec, shared) - jf.spec.active(spec, shared) == 2 * 2 * 3 * 16 * 8  # layers, idle experts, maps, D, F
