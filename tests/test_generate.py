"""Generation: greedy against the uncached forward, chunks through the cache, padding, ends (rules 2, 12 to 16)."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxformer as jf
from jaxformer.decode.generate import _generate

pytestmark = pytest.mark.usefixtures("quick_compilation")
PROMPTS = [[5, 9, 11], [7, 3, 20, 41, 13, 8, 30]]
NEW = 5
LENGTH = 12
FILLER = 66  # stands where padding does; its embedding is no zero

forward = jax.jit(jf.forward, static_argnums=2)


def close(found, expected):
    # float32 sums in another order: about a hundred roundings of the largest logit in two layers
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def row_inputs(cfg, row):
    """The source of one row, without its padding."""
    given = tiny.inputs(cfg)
    return {"source": given["source"][row : row + 1][:, given["source_valid"][row]]} if given else {}


def greedy(params, cfg, prompt, given):
    """Tokens and their log-probabilities, by running the forward without a cache again for every token."""
    ids, logprobs = list(prompt), []
    for _ in range(NEW):
        padded = np.array([ids + [FILLER] * (LENGTH - len(ids))])
        logits = np.asarray(forward(params, padded, cfg, **given))[0, len(ids) - 1]
        best, second = np.sort(logits)[::-1][:2]
        assert best - second > 1e-3, "a near tie would make the comparison of tokens meaningless"
        ids.append(int(logits.argmax()))
        logprobs.append(float(jax.nn.log_softmax(logits)[ids[-1]]))
    return ids[len(prompt) :], logprobs


@functools.cache
def model(name):
    cfg = tiny.PRESETS[name]
    window = cfg.window[:2] if isinstance(cfg.window, tuple) else cfg.window
    cfg = dataclasses.replace(cfg, n_layers=2, encoder_layers=min(cfg.encoder_layers, 2), window=window)
    return cfg, tiny.drawn(cfg)


@functools.cache
def alone(name):
    cfg, params = model(name)
    rows = [greedy(params, cfg, prompt, row_inputs(cfg, row)) for row, prompt in enumerate(PROMPTS)]
    return np.array([tokens for tokens, _ in rows]), np.array([logprobs for _, logprobs in rows])


def padded(side):
    width = max(map(len, PROMPTS))
    ids, valid = np.full((2, width), FILLER), np.zeros((2, width), bool)
    for row, prompt in enumerate(PROMPTS):
        at = slice(len(prompt)) if side == "right" else slice(width - len(prompt), None)
        ids[row, at], valid[row, at] = prompt, True
    return ids, valid


@pytest.mark.parametrize("name", tiny.PRESETS)
def test_greedy_is_the_uncached_argmax_and_padding_changes_nothing(name):
    """Ragged prompts as lists, left-padded and right-padded: each row as alone (rules 7, 13)."""
    cfg, params = model(name)
    tokens, logprobs = alone(name)
    given = tiny.inputs(cfg)
    unmasked = jf.generate(params, padded("left")[0], cfg, max_new_tokens=NEW, **given)
    assert not np.allclose(unmasked.logprobs[0], logprobs[0], atol=1e-2), "the padding would change the row, were it seen"
    outs = {"lists": jf.generate(params, PROMPTS, cfg, max_new_tokens=NEW, **given)}
    for side in ("left", "right"):
        ids, valid = padded(side)
        outs[side] = jf.generate(params, ids, cfg, max_new_tokens=NEW, valid=valid, **given)
    for side, out in outs.items():
        np.testing.assert_array_equal(out.tokens, tokens, err_msg=side)
        np.testing.assert_array_equal(out.lengths, [NEW, NEW])
        # a log-probability is a difference of float32 numbers of the logits' size, below 100 here
        np.testing.assert_allclose(out.logprobs, logprobs, atol=1e-3, rtol=0, err_msg=side)


@pytest.mark.parametrize("name", tiny.PRESETS)
def test_chunks_through_the_cache_are_the_whole_forward(name):
    """A prefill of p tokens, then single steps, in a cache longer than the sequence (rule 2)."""
    cfg, params = model(name)
    tokens, given, length = tiny.tokens(cfg, 1, LENGTH), row_inputs(cfg, 1), LENGTH
    whole = np.asarray(forward(params, tokens, cfg, **given))
    other = np.asarray(forward(params, np.where(np.arange(length) < length - 1, 4, tokens), cfg, **given))
    assert np.abs(other - whole)[:, -1].max() > 0.1, "the history matters"
    for first in (1, 2, length - 1):
        logits, cache = forward(params, tokens[:, :first], cfg, cache=jf.init_cache(cfg, 1, length + 3), **given)
        parts = [logits]
        for at in range(first, length):
            logits, cache = forward(params, tokens[:, at : at + 1], cfg, cache=cache)
            parts.append(logits)
        close(np.concatenate(parts, axis=1), whole)
        assert (np.asarray(cache.used) == length).all()


@pytest.mark.parametrize("name", ["mistral", "gpt2"])
@pytest.mark.parametrize("padding", [slice(0, 2), slice(1, 3)], ids=["left", "right"])
def test_chunks_of_padded_rows(padding, name):
    """Two rows, one padded in its first chunk of three; more chunks of several tokens follow. Each row as alone."""
    cfg, params = model(name)
    tokens, valid = tiny.tokens(cfg), np.ones((2, 9), bool)
    valid[0, padding] = False
    cache, parts = jf.init_cache(cfg, 2, 9), []
    for start, stop in ((0, 3), (3, 6), (6, 9)):
        part, cache = forward(params, tokens[:, start:stop], cfg, valid=valid[:, start:stop], cache=cache)
        parts.append(part)
    found = np.concatenate(parts, axis=1)

    def whole(ids):
        return np.asarray(forward(params, np.array([[*ids, *[FILLER] * (LENGTH - len(ids))]]), cfg))[0, : len(ids)]

    assert np.abs(whole(tokens[0])[valid[0]] - found[0, valid[0]]).max() > 0.1, "padding that is seen changes the row"
    for row in range(2):
        close(found[row, valid[row]], whole(tokens[row, valid[row]]))


# The end of the cache (rule 12)


def filled(name, length, used):
    cfg, params = model(name)
    tokens = tiny.tokens(cfg, 1, length)
    _, cache = forward(params, tokens[:, :used], cfg, cache=jf.init_cache(cfg, 1, length))
    return cfg, params, tokens, cache


@pytest.mark.parametrize("name", ["llama_gqa", "gpt2"])
def test_a_write_past_the_end_raises_and_exactly_full_works(name):
    cfg, params, tokens, cache = filled(name, 8, 6)
    with pytest.raises(ValueError, match="3 tokens do not fit: 6 of the cache's 8 slots"):
        jf.forward(params, tokens[:, :3], cfg, cache=cache)
    logits = []
    for at in (6, 7):
        out, cache = forward(params, tokens[:, at : at + 1], cfg, cache=cache)
        logits.append(out)
    close(np.concatenate(logits, axis=1), np.asarray(forward(params, tokens, cfg))[:, 6:])
    with pytest.raises(ValueError, match="1 tokens do not fit: 8 of the cache's 8 slots"):
        jf.forward(params, tokens[:, :1], cfg, cache=cache)


def test_a_traced_write_past_the_end_gives_nan():
    cfg, params, tokens, cache = filled("llama_gqa", 8, 6)
    full, after = forward(params, tokens[:, 6:8], cfg, cache=cache)
    assert np.isfinite(full).all()
    assert np.isnan(forward(params, tokens[:, :1], cfg, cache=after)[0]).all()
    assert np.isnan(forward(params, tokens[:, :3], cfg, cache=cache)[0]).all()
    with pytest.raises(ValueError, match="do not fit"):  # known while tracing: more than the cache has at all
        forward(params, tiny.tokens(cfg, 1, 9), cfg, cache=cache)


def test_generation_up_to_the_last_row_of_a_learned_table():
    cfg, params = model("gpt2")
    prompt = [list(range(1, cfg.max_length - 3))]  # 20 tokens, 24 rows; the last token needs no position any more
    out = jf.generate(params, prompt, cfg, max_new_tokens=5)
    assert np.isfinite(out.logprobs).all()
    with pytest.raises(ValueError, match="max_length=24"):
        jf.generate(params, prompt, cfg, max_new_tokens=6)


# Ends (rule 14)


def test_after_an_end_a_row_emits_padding_only():
    cfg, params = model("llama_mha")
    tokens, logprobs = alone("llama_mha")
    eos, pad = (int(tokens[0, 1]), int(tokens[1, 3])), 50
    out = jf.generate(params, PROMPTS, cfg, max_new_tokens=NEW, eos=eos, pad=pad)
    counts = []
    for row in range(2):
        stops = [i for i, token in enumerate(tokens[row]) if token in eos]
        count = stops[0] + 1 if stops else NEW
        np.testing.assert_array_equal(out.tokens[row], [*tokens[row][:count], *[pad] * (NEW - count)])
        assert np.abs(out.logprobs[row, :count] - logprobs[row, :count]).max() < 1e-3  # as above
        assert not out.logprobs[row, count:].any()
        counts.append(count)
    np.testing.assert_array_equal(out.lengths, counts)
    assert len(set(counts)) == 2 and min(counts) < NEW, "one row goes on after the other has ended"


# Encoder–decoder (rule 15)


@pytest.mark.parametrize("side", ["left", "right"])
def test_encoder_padding_changes_nothing(side):
    """Nor does it change generation: see the first test, where one source is padded."""
    cfg, params = model("transformer_base")
    source, tokens = tiny.tokens(cfg, 1, 5, seed=3), tiny.tokens(cfg, 1, LENGTH, seed=4)
    filler = np.full((1, 2), FILLER)
    wide = np.concatenate([filler, source] if side == "left" else [source, filler], axis=1)
    valid = wide != FILLER
    plain = np.asarray(forward(params, tokens, cfg, source=source))
    assert np.abs(np.asarray(forward(params, tokens, cfg, source=wide)) - plain).max() > 0.1, "unmasked padding is seen"
    masked = np.asarray(forward(params, tokens, cfg, source=wide, source_valid=valid))
    close(masked, plain)
    other = np.where(valid, wide, 4)
    np.testing.assert_array_equal(forward(params, tokens, cfg, source=other, source_valid=valid), masked)


# Compilation (rule 16)


def test_one_compilation_for_calls_of_one_shape():
    cfg, params = model("llama_gqa")

    def call(prompts, params, seed):
        sampling = jf.Sampling(temperature=0.7)
        return jf.generate(params, prompts, cfg, max_new_tokens=3, sampling=sampling, key=jax.random.key(seed)).tokens

    first = call([[5, 6, 7, 8], [9]], params, 0)
    count = _generate._cache_size()
    outs = [
        call([[5, 6, 7, 8], [9]], params, 1),
        call([[9, 8], [7, 6, 5, 4]], params, 0),
        call(np.ones((2, 4), int), params, 0),
    ]
    outs.append(call([[5, 6, 7, 8], [9]], jax.tree.map(lambda p: p * 1.5, params), 0))
    assert _generate._cache_size() == count
    assert all(not np.array_equal(out, first) for out in outs)


def largest_constant(lowered) -> int:
    """Bytes of the largest array written into a program."""
    texts = re.findall(r'dense<"0x([0-9A-Fa-f]*)"', lowered.as_text(debug_info=False))
    return max((len(text) // 2 for text in texts), default=0)


def test_weights_are_arguments():
    cfg, params = model("llama_gqa")
    prompts, valid, key = jnp.ones((1, 4), jnp.int32), jnp.ones((1, 4), bool), jax.random.key(0)
    static = (cfg, 3, jf.Sampling(temperature=0), (), 0)
    smallest_kernel = cfg.d_model * cfg.n_kv_heads * cfg.head_dim * 4
    closure = jax.jit(lambda ids: _generate(params, ids, valid, None, None, key, *static))
    assert largest_constant(closure.lower(prompts)) >= smallest_kernel, "a weight in the program is seen here"
    assert largest_constant(_generate.lower(params, prompts, valid, None, None, key, *static)) < smallest_kernel


def test_a_hole_takes_no_place_in_a_window_with_and_without_a_cache():
    cfg = tiny.PRESETS["mistral"]
    params, tokens = tiny.drawn(cfg), tiny.tokens(cfg, 1, 9)
    valid = np.array([[True, True, False, False, True, True, True, False, True]])
    whole = jf.forward(params, tokens, cfg, valid=valid)
    cached, _ = jf.forward(params, tokens, cfg, valid=valid, cache=jf.init_cache(cfg, 1, 9))
    alone = jf.forward(params, tokens[:, valid[0]], cfg)
    scale = float(np.abs(alone).max())
    assert np.abs(np.asarray(jf.forward(params, tokens, cfg))[valid] - alone[0]).max() > 1e-2 * scale  # holes matter
    np.testing.assert_allclose(np.asarray(whole)[valid], alone[0], atol=1e-5 * scale)  # float32, sums in another order
    np.testing.assert_allclose(np.asarray(cached)[valid], alone[0], atol=1e-5 * scale)
