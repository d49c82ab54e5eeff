"""What nobody may see changes nothing, whatever it is, NaN and infinity too: slots of a cache that hold no token or one that
was taken back, padding given as embeddings, guesses that are rejected."""

import dataclasses

import example_components as example
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxformer as jf
from jaxformer.nn.attend import attend

pytestmark = pytest.mark.usefixtures("quick_compilation")

LENGTH, AHEAD = 12, 3


def shallow(name, layers=1, **fields):
    cfg = tiny.PRESETS[name]
    window = cfg.window[:layers] if isinstance(cfg.window, tuple) else cfg.window
    return dataclasses.replace(cfg, n_layers=layers, encoder_layers=min(1, cfg.encoder_layers), window=window, **fields)


KINDS = {
    "grouped": shallow("llama_gqa"),
    "learned positions": shallow("gpt2"),
    "ring": shallow("mistral"),
    "ring and full": shallow("mixed_windows", 2),
    "latent": shallow("deepseek"),
    "cross-attention": shallow("transformer_base"),
    "relative positions": shallow("llama_mha", position="relative"),
    "the user's positions": shallow("llama_mha", position=example.Alibi),
    "the user's attention": shallow("llama_mha", attention=example.MeanAttention),
    "the user's attention, ring": shallow("mistral", attention=example.MeanAttention),
}


def begun(name):
    """A cache that has read 6, 0 and 3 tokens, what reads more, and the parameters."""
    cfg = KINDS[name]
    params = tiny.drawn(cfg)
    feed = lambda cache, tokens, **given: tiny.forward_cached(params, tokens, cfg, cache, **given)
    source = tiny.inputs(cfg, 3)
    valid = np.arange(6) < np.array([[6], [0], [3]])
    _, cache = feed(jf.init_cache(cfg, 3, LENGTH, ahead=AHEAD), tiny.tokens(cfg, 3, 6), valid=valid, **source)
    return cfg, feed, cache


def filled(cache, value):
    """``cache`` with ``value`` in every slot that holds no token, and how many slots those are."""
    used, count, layers = np.asarray(cache.used), 0, []
    for layer, dims in zip(cache.layers, map(dict, cache.dims), strict=True):
        entries = dict(layer)
        for name, letters in dims.items():
            axis, x = letters.index("S"), np.array(layer[name])
            slots = x.shape[axis]
            held = np.zeros((len(used), slots), bool)
            for row, number in enumerate(used):
                held[row, np.arange(max(0, number - slots), number) % slots] = True
            garbage = np.asarray(value if x.dtype.kind == "f" else 2**31 - 1, x.dtype)
            entries[name] = np.where(np.expand_dims(held, [a for a in range(1, x.ndim) if a != axis]), x, garbage)
            count += (~held).sum()
        if "source_info" in layer:
            padding = ~np.asarray(layer["source_info"].valid)[:, None, :, None]
            assert padding.any()
            for name in ("source_key", "source_value"):
                entries[name] = np.where(padding, value, layer[name])
        layers.append(entries)
    return dataclasses.replace(cache, layers=tuple(layers)), count


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e30])
@pytest.mark.parametrize("name", KINDS)
def test_slots_without_a_token_may_hold_anything(name, value):
    """Chunks and single steps, rows that are empty, and rows that have ended (not fed)."""
    cfg, feed, cache = begun(name)
    other, count = filled(cache, value)
    assert count >= 12, "there are such slots"
    for width, fed in ((3, [3, 2, 0]), (1, [1, 0, 1]), (1, [0, 1, 1])):
        tokens, valid = tiny.tokens(cfg, 3, width, seed=width), np.arange(width) < np.array(fed)[:, None]
        expected, cache = feed(cache, tokens, valid=valid)
        found, other = feed(other, tokens, valid=valid)
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", KINDS)
def test_a_chunk_that_was_not_finite_leaves_nothing_behind(name, value):
    """Rows take back 3, 2 and 0 of the tokens of a chunk whose embeddings were ``value``, then go on in chunks and steps."""
    cfg, feed, cache = begun(name)
    bad = np.full((3, AHEAD, cfg.d_model), value, np.float32)
    fed = np.arange(AHEAD) < np.array([[3], [2], [0]])
    logits, other = feed(cache, None, embeddings=bad, valid=fed)
    assert not np.isfinite(logits[0]).any(), "the chunk was not finite"
    other = other.rewind(cache.used)
    for width in (2, 1, 1):
        tokens = tiny.tokens(cfg, 3, width, seed=width)
        expected, cache = feed(cache, tokens)
        found, other = feed(other, tokens)
        np.testing.assert_array_equal(found, expected)


def test_what_a_query_sees_is_not_hidden():
    """Of a chunk's tokens, the second is NaN: the first does not know, the second and third do."""
    cfg, feed, cache = begun("grouped")
    table = np.asarray(tiny.drawn(cfg)["embedding"]["token"])
    tokens = tiny.tokens(cfg, 3, 3)
    values = table[tokens]
    expected, _ = feed(cache, None, embeddings=values)
    bad = np.where(np.arange(3)[:, None] == 1, np.nan, values)
    found, _ = feed(cache, None, embeddings=bad)
    np.testing.assert_array_equal(found[:, 0], expected[:, 0])
    assert np.isnan(found[:, 1:]).all() and np.isfinite(expected).all()


@pytest.mark.parametrize("on", ["cpu", "gpu"])
@pytest.mark.parametrize("queries", [1, 3])
def test_attention_selects_what_is_seen(on, queries, monkeypatch):
    """Both ways of doing it, by an attention in float64 that leaves the hidden keys out; a row that sees none gives 0."""
    monkeypatch.setattr("jaxformer.nn.attend.platform", lambda: on)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 2, *shape, 4)).astype(np.float32) for shape in ((3, queries), (5,), (5,)))
    seen = np.array([[True, False, True, True, False], [False] * 5])
    k[:, :, ~seen[0]], v[:, :, ~seen[0]] = np.nan, np.inf
    v[1] = np.nan
    mask = np.broadcast_to(seen[:, None], (2, queries, 5))
    out = np.asarray(jax.jit(lambda *qkvm: attend(*qkvm, cached=True))(q, k, v, mask))
    scores = np.exp(np.einsum("kgth,ksh->kgts", q[0].astype(float), k[0][:, seen[0]]) / 2)
    expected = np.einsum("kgts,ksh->kgth", scores / scores.sum(-1, keepdims=True), v[0][:, seen[0]])
    np.testing.assert_allclose(out[0], expected, atol=1e-6)  # a few roundings of values up to 3
    assert (out[1] == 0).all()


# Padding that is given as embeddings


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["llama_gqa", "gpt2", "mistral", "deepseek", "recurrence"])
def test_embeddings_of_padding_may_be_anything(name, value):
    """Without and with a cache, and in the gradient; on either side of the tokens."""
    cfg = shallow("llama_mha", attention=example.MovingAverage(0.5)) if name == "recurrence" else shallow(name)
    params, rng = tiny.drawn(cfg), np.random.default_rng(0)
    values, valid = rng.standard_normal((2, 6, cfg.d_model)).astype(np.float32), np.ones((2, 6), bool)
    valid[0, 4:], valid[1, :3] = False, False
    bad = np.where(valid[..., None], values, value)
    expected = np.asarray(jf.forward(params, None, cfg, embeddings=values, valid=valid))
    assert np.isfinite(expected).all()
    found = np.asarray(jf.forward(params, None, cfg, embeddings=bad, valid=valid))
    np.testing.assert_array_equal(found[valid], expected[valid])
    cached = [
        tiny.forward_cached(params, None, cfg, jf.init_cache(cfg, 2, 8), embeddings=x, valid=valid)[0] for x in (values, bad)
    ]
    np.testing.assert_array_equal(cached[1][valid], cached[0][valid])

    def loss(params, x):
        batch = {"tokens": np.ones((2, 6), np.int32), "targets": np.full((2, 6), 2), "weights": valid.astype(np.float32)}
        more = {"embeddings": x, "embeddings_mask": np.ones((2, 6), bool), "valid": valid}
        return jf.loss(params, batch | more, cfg)[0]

    if name != "recurrence":
        grads = [jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x) for x in (values, bad)]
        jax.tree.map(np.testing.assert_array_equal, *grads)


# Guesses that are rejected


@pytest.mark.parametrize("name", ["llama_gqa", "mistral", "transformer_base", "deepseek"])
def test_a_rejected_guess_may_be_anything(name):
    """The draft always guesses a token whose embedding is NaN, which the model itself never chooses."""
    cfg = shallow(name)
    params, bad = tiny.drawn(cfg), 60
    table = params["embedding"]["token"].at[bad].set(jnp.nan)
    params = params | {"embedding": params["embedding"] | {"token": table}}
    if cfg.tied_head:
        cfg = dataclasses.replace(cfg, tied_head=False)
        params = params | {"head": tiny.drawn(cfg)["head"]}
    draft_cfg = dataclasses.replace(shallow("llama_mha"), head_bias=True)
    draft = tiny.drawn(draft_cfg)
    draft = draft | {"head": draft["head"] | {"bias": jnp.zeros(cfg.vocab_size).at[bad].set(1e4)}}
    given = {"max_new_tokens": 6, "sampling": jf.Sampling(temperature=0.0, presence_penalty=1000.0)} | tiny.inputs(cfg)
    prompts = [[5, 9, 11], [7, 3, 20, 41, 13]]
    guessed = jf.generate(params, prompts, cfg, **given, draft=jf.DraftModel(draft, draft_cfg))
    alone = jf.generate(params, prompts, cfg, **given)
    assert bad not in np.asarray(alone.tokens) and (np.asarray(guessed.acceptance) == 0).all()
    np.testing.assert_array_equal(guessed.tokens, alone.tokens)
    assert np.isfinite(guessed.logprobs).all()
