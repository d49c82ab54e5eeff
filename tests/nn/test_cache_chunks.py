"""Chunks of any widths through the cache, with padding anywhere, rings or not, are the whole forward (rules 2, 3, 7, 8, 13)."""

import functools

import example_components as example
import jax
import numpy as np
import pytest
import tiny
from decoding import LENGTH, PADS, close, forward, inputs, loud, model, row_inputs

import jaxformer as jf
from jaxformer.nn import cache as cache_module

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("name", tiny.PRESETS)
def test_chunks_are_the_whole_forward(name):
    """In a cache longer than the sequence; ``test_attention`` has other widths."""
    cfg, params = model(name)
    tokens, given = tiny.tokens(cfg, 1, LENGTH), row_inputs(cfg, 1)
    whole = np.asarray(forward(params, tokens, cfg, **given))
    other = np.asarray(forward(params, np.where(np.arange(LENGTH) < LENGTH - 1, 4, tokens), cfg, **given))
    assert np.abs(other - whole)[:, -1].max() > 0.1, "the history matters"
    cache, parts = jf.init_cache(cfg, 1, LENGTH + 3), []
    for at in range(0, LENGTH, 4):
        logits, cache = tiny.forward_cached(params, tokens[:, at : at + 4], cfg, cache, **(given if at == 0 else {}))
        parts.append(logits)
    close(np.concatenate(parts, axis=1), whole)
    assert cache.used.tolist() == [LENGTH]


# Rows that fill at their own pace

RAGGED = {  # name -> (config, tokens that each ring keeps beyond its window)
    "rings of 4 and all slots": (model("mixed_windows")[0], 0),
    "rings of 4 and 3 more": (model("mistral")[0], 3),
    "rings of 1": (model("mistral", layers=1, window=1)[0], 0),
    "rings that keep positions": (model("mistral", layers=1, position=example.Alibi)[0], 0),
    "learned positions": (model("gpt2", layers=1)[0], 0),
}
ROWS, TOTAL, WIDTHS = 3, 22, (6, 1, 5, 1, 5, 1, 1, 1, 1)
"""Chunks wider and narrower than the windows, and of just as many tokens as a ring has room for."""


def holes():
    """Which of the [ROWS, TOTAL] tokens are there: a row without holes, one padded on the left with holes, one at random."""
    valid = np.ones((ROWS, TOTAL), bool)
    valid[1, [0, 1, 2, 6, 8, 11]] = False
    valid[2] = np.random.default_rng(4).random(TOTAL) < 0.6
    return valid


def fed(cfg, params, ahead, valid, tokens, slots=None):
    """Logits [ROWS, TOTAL, V] of the chunks, and the cache they leave."""
    cache, start, parts = jf.init_cache(cfg, ROWS, slots or TOTAL, ahead=ahead), 0, []
    for width in WIDTHS:
        at = slice(start, start + width)
        logits, cache = tiny.forward_cached(params, tokens[:, at], cfg, cache, valid=valid[:, at])
        parts.append(logits)
        start += width
    return np.concatenate(parts, axis=1), cache


@functools.cache
def ragged(name):
    cfg, ahead = RAGGED[name]
    params, valid = tiny.drawn(cfg), holes()
    tokens = np.where(valid, np.minimum(tiny.tokens(cfg, ROWS, TOTAL), PADS[1] - 1), PADS[1])
    return fed(cfg, loud(params), ahead, valid, tokens), tokens


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_chunks_are_each_row_alone(name):
    """Without its holes, whatever the embedding in the holes is, by the forward without a cache."""
    cfg, _ = RAGGED[name]
    (found, cache), tokens = ragged(name)
    params, valid = tiny.drawn(cfg), holes()
    assert cache.used.tolist() == valid.sum(1).tolist() and len(set(cache.used.tolist())) == ROWS
    quiet = np.flatnonzero(~np.isin(np.arange(cfg.vocab_size), PADS))  # a tied head gives loud logits too
    unmasked = np.asarray(forward(params, tokens, cfg))
    for row in range(ROWS):
        ids, here = tokens[row, valid[row]], valid[row]
        alone = np.asarray(forward(params, np.array([[*ids, *[4] * (TOTAL - len(ids))]]), cfg))[0, : len(ids)]
        close(found[row, here][:, quiet], alone[:, quiet])
        # in a window of one token there is nothing else to see
        assert here.all() or cfg.window == 1 or np.abs(unmasked[row, here] - alone)[:, quiet].max() > 0.1, "holes matter"


@pytest.mark.parametrize("name", ["rings of 4 and all slots", "rings of 4 and 3 more"])
def test_rings_are_full_caches_with_a_window(name):
    cfg, ahead = RAGGED[name]
    (found, ring), tokens = ragged(name)
    expected, full = fed(cfg, loud(tiny.drawn(cfg)), TOTAL, holes(), tokens)
    window = cfg.window[0] if isinstance(cfg.window, tuple) else cfg.window
    assert ring.layers[0]["value"].shape[2] == window + ahead and full.layers[0]["value"].shape[2] == TOTAL
    assert ring.used.max() > 2 * (window + ahead), "the ring was filled twice"
    quiet = np.flatnonzero(~np.isin(np.arange(cfg.vocab_size), PADS))
    here = holes()
    close(found[here][:, quiet], expected[here][:, quiet])


def test_a_chunk_writes_no_slot_twice(monkeypatch):
    """Which of two writes to one slot lasts is not defined on every device: of a long chunk, the last tokens are written."""
    cfg, _ = model("mistral")
    valid = holes()[:, :11]
    info, cache = jf.init_cache(cfg, ROWS, TOTAL).advance((ROWS, 11), cfg, None, valid)
    written, write = [], cache_module._write
    monkeypatch.setattr(
        cache_module, "_write", lambda old, new, slot, axis: written.append(slot) or write(old, new, slot, axis)
    )
    entry = np.zeros((ROWS, cfg.n_kv_heads, 11, cfg.head_dim), np.float32)
    cache.layer(0, cfg.layers[0], info).extend({"key": entry, "value": entry})
    for slots, here in zip(np.asarray(written[0]), valid, strict=True):
        assert len(set(slots)) == 11 and (slots[~here] >= 4).all()
        order = np.arange(here.sum())
        np.testing.assert_array_equal(slots[here][-4:], order[-4:] % 4)
        assert (slots[here][:-4] >= 4).all(), "past the end of a ring of 4, where nothing is written"


def test_a_hole_takes_no_place_in_a_window_without_a_cache_either():
    cfg, params = model("mistral")
    tokens = tiny.tokens(cfg, 1, 9)
    valid = np.array([[True, True, False, False, True, True, True, False, True]])
    alone = forward(params, tokens[:, valid[0]], cfg)
    scale = float(np.abs(alone).max())
    assert np.abs(np.asarray(forward(params, tokens, cfg))[valid] - alone[0]).max() > 1e-2 * scale, "holes matter"
    close(np.asarray(forward(params, tokens, cfg, valid=valid))[valid], np.asarray(alone)[0])


# Dtypes of cache and model


OTHER = [("float32", "bfloat16"), ("bfloat16", "float32")]
"""Dtypes of the model and of its cache."""


@pytest.mark.parametrize(
    ("name", "dtype", "kept"), [*(("mixed_windows", *dtypes) for dtypes in OTHER), ("transformer_base", *OTHER[0])]
)
def test_the_cache_may_have_another_dtype_than_the_model(name, dtype, kept):
    cfg, params = model(name, dtype=dtype)
    tokens, given, parts = tiny.tokens(cfg, 2, 9), inputs(cfg), {}
    for cache_dtype in (kept, dtype):
        cache, logits = jf.init_cache(cfg, 2, 9, dtype=cache_dtype), []
        for at in (0, 3, 6):
            chunk, cache = tiny.forward_cached(params, tokens[:, at : at + 3], cfg, cache, **(given if at == 0 else {}))
            logits.append(chunk)
            assert {layer[entry].dtype for layer in cache.layers for entry in ("key", "value")} == {np.dtype(cache_dtype)}
        parts[cache_dtype] = np.concatenate(logits, axis=1)
    whole = np.asarray(forward(params, tokens, cfg, **given))
    largest = np.abs(whole).max()
    assert np.isfinite(parts[kept]).all()
    # bfloat16 rounds by 2⁻⁹ at most: keys and values, or every activation; 2⁻⁵ is sixteen such roundings, in two layers
    for found in parts.values():
        assert np.abs(found - whole).max() < 2**-5 * largest
    if dtype == "float32":  # the other way round, what is kept has been rounded by the model already
        assert np.abs(parts[kept] - parts[dtype]).max() > 1e-4 * largest, "rounding is seen"


@pytest.mark.parametrize(("dtype", "kept"), OTHER)
def test_generation_with_a_cache_of_another_dtype(dtype, kept):
    cfg, params = model("mistral", layers=1, dtype=dtype)
    prompt = tiny.tokens(cfg, 1, LENGTH)
    given = {"max_new_tokens": 5, "cache_dtype": kept}
    out = jf.generate(params, prompt, cfg, **given)
    assert out.tokens.shape == (1, 5) and np.isfinite(out.logprobs).all()
    expected = jax.nn.log_softmax(forward(params, prompt, cfg)[0, -1])[out.tokens[0, 0]]
    assert abs(out.logprobs[0, 0] - expected) < 0.1  # of size 1 to 5, rounded as above
    text = jax.jit(lambda params: jf.generate(params, prompt, cfg, **given).tokens).lower(params).as_text()
    assert f"x4x8x{'bf16' if kept == 'bfloat16' else 'f32'}>" in text, "a ring of 4 slots has that dtype"
