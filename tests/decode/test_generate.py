"""Generation over all presets: greedy against the uncached forward, padding, prefill in chunks, ends (rules 2, 7, 13 to 16)."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from decoding import GREEDY, NEW, PADS, PROMPTS, alone, close, forward, inputs, loud, model, padded, widths

import jaxformer as jf
from jaxformer.decode import loop, sampling
from jaxformer.decode.generate import _generate
from jaxformer.decode.request import Inputs, Request, bucket
from jaxformer.nn import cache_spec as caches

pytestmark = pytest.mark.usefixtures("quick_compilation")


def generate(params, prompts, cfg, **given):
    return jf.generate(params, prompts, cfg, **({"max_new_tokens": NEW, "sampling": GREEDY} | inputs(cfg) | given))


@pytest.mark.parametrize("name", tiny.PRESETS)
def test_greedy_is_the_uncached_argmax_and_padding_changes_nothing(name):
    """Ragged prompts as lists, left-padded and right-padded, whatever the padding's embedding is: each row as alone."""
    cfg, params = model(name)
    tokens, logprobs = alone(name)
    unmasked = generate(params, padded("left")[0], cfg)
    assert not np.allclose(unmasked.logprobs[0], logprobs[0], atol=1e-2), "the padding would change the row, were it seen"
    for weights in (params, loud(params)):
        outs = {"lists": generate(weights, PROMPTS, cfg)}
        for side in ("left", "right"):
            ids, valid = padded(side)
            outs[side] = generate(weights, ids, cfg, valid=valid)
        for side, out in outs.items():
            np.testing.assert_array_equal(out.tokens, tokens, err_msg=side)
            np.testing.assert_array_equal(out.lengths, [NEW, NEW])
            if weights is params:  # a tied head gives loud logits too
                # a log-probability is a difference of float32 numbers of the logits' size, below 100 here
                np.testing.assert_allclose(out.logprobs, logprobs, atol=1e-3, rtol=0, err_msg=side)


def test_windows_are_rings_here():
    """So that the tests above and below read rings of 4 slots that 12 tokens pass through, and other layers all slots."""
    cfg, _ = model("mixed_windows")
    spec = caches.spec(cfg, 1, bucket(7 + NEW - 1))
    assert [layer["key"].shape(cfg)[2] for layer in spec.layers] == [4, 16]


unstack = jax.jit(jf.model.unstack, static_argnums=1)
VARIANTS = {  # of the program; the tokens stay
    "chunks of 3, layers unstacked": (3, unstack, NEW, {}),
    "chunks of 4, layers scanned": (4, lambda params, cfg: params, 1, {"scan": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", tiny.PRESETS)
def test_prefill_in_chunks_and_other_programs_give_the_same_tokens(name, variant, monkeypatch):
    chunk, convert, new, fields = VARIANTS[variant]
    cfg, params = model(name, **fields)
    shapes = widths(monkeypatch)
    out = generate(convert(loud(params), cfg), PROMPTS, cfg, prefill_chunk=chunk, max_new_tokens=new)
    assert {(2, chunk)} <= set(shapes) <= {(2, chunk), (2, 1)}, "prompts of 7, padded to 16, are read in chunks"
    np.testing.assert_array_equal(out.tokens, alone(name)[0][:, :new])


@pytest.mark.parametrize("name", tiny.PRESETS)
def test_scanned_and_unstacked_layers_give_the_same_logits(name):
    (cfg, params), (scanned, _) = model(name, layers=2), model(name, layers=2, scan=True)
    tokens, given = tiny.tokens(cfg), inputs(cfg)
    run = lambda params, cfg: jf.forward(params, tokens, cfg, **given)
    scans = [str(jax.make_jaxpr(run, static_argnums=1)(params, cfg)).count(" scan[") for cfg in (scanned, cfg)]
    assert scans[0] and not scans[1]
    together = jax.jit(lambda params: (run(params, cfg), run(params, scanned), run(jf.model.unstack(params, cfg), cfg)))
    logits, scanned_logits, unstacked_logits = together(params)
    close(scanned_logits, logits)
    close(unstacked_logits, logits)


TREES = ["transformer_base", "decoder_2017", "decoder_2017_learned", "gpt2", "qwen2_5", "qwen3", "mixed_windows", "deepseek"]
"""Presets that have all the trees of parameters there are."""


def test_other_presets_have_the_same_trees_of_parameters():
    trees = {name: jax.tree.structure(jf.model.spec(model(name)[0])) for name in tiny.PRESETS}
    assert {trees[name] for name in TREES} == set(trees.values())


@pytest.mark.parametrize("name", TREES)
def test_gradients_of_unstacked_layers_are_those_of_stacked_ones(name):
    cfg, params = model(name, layers=2)
    batch = tiny.batch(cfg, rows=2, length=5)
    loss = jax.grad(lambda params: jf.loss(params, batch, cfg)[0])
    stacked, unstacked = jax.jit(lambda params: (loss(params), loss(jf.model.unstack(params, cfg))))(params)
    expected = unstack(stacked, cfg)
    assert jax.tree.structure(unstacked) == jax.tree.structure(expected) != jax.tree.structure(stacked)
    for path, leaf in jax.tree.leaves_with_path(
        expected
    ):  # softmax ignores a key's bias unless RoPE turns it; an expert's chooses alone
        unfelt = any(name in jax.tree_util.keystr(path) for name in ("key_bias", "['moe']['bias']"))
        assert unfelt or np.abs(leaf).max() > 1e-4, path
    # float32 sums that the compiler fuses in another way, of gradients of size 1e-2 to 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), unstacked, expected)


def test_an_encoder_decoder_starts_by_itself():
    cfg, params = model("transformer_base")
    out = generate(params, None, cfg)
    np.testing.assert_array_equal(out.tokens, generate(params, [[cfg.start_token]] * 2, cfg).tokens)
    assert not np.allclose(out.logprobs, generate(params, [[9]] * 2, cfg).logprobs, atol=0.1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_the_source_changes_nothing(side):
    """Rule 15, in the forward; of generation, see the first test, where one source is padded."""
    cfg, params = model("transformer_base")
    source, tokens = tiny.tokens(cfg, 1, 5, seed=3), tiny.tokens(cfg, 1, 12, seed=4)
    filler = np.full((1, 2), PADS[1])
    wide = np.concatenate([filler, source] if side == "left" else [source, filler], axis=1)
    valid = wide != PADS[1]
    assert valid.sum() == 5
    plain = np.asarray(forward(params, tokens, cfg, source=source))
    assert np.abs(np.asarray(forward(params, tokens, cfg, source=wide)) - plain).max() > 0.1, "unmasked padding is seen"
    masked = np.asarray(forward(params, tokens, cfg, source=wide, source_valid=valid))
    close(masked, plain)
    other = np.where(valid, wide, 4)
    np.testing.assert_array_equal(forward(params, tokens, cfg, source=other, source_valid=valid), masked)


def test_up_to_the_last_row_of_a_learned_table():
    cfg, params = model("gpt2")
    prompt = list(range(1, cfg.max_length - 3))  # 20 tokens, 24 rows; the last token needs no position any more
    out = jf.generate(params, [prompt], cfg, max_new_tokens=5, prefill_chunk=7)
    read = np.array([[*prompt, *out.tokens[0, :4]]])
    logprobs = jax.nn.log_softmax(forward(params, read, cfg)[0, len(prompt) - 1 :])
    np.testing.assert_array_equal(out.tokens[0], logprobs.argmax(-1))
    np.testing.assert_allclose(out.logprobs[0], logprobs.max(-1), atol=1e-3)  # as above
    with pytest.raises(ValueError, match="max_length=24"):
        jf.generate(params, [prompt], cfg, max_new_tokens=6)


# Ends (rule 14)


@pytest.mark.parametrize("name", ["llama_mha", "mistral"])
def test_after_an_end_a_row_emits_padding_only(name):
    cfg, params = model(name)
    tokens, logprobs = alone(name)
    eos, pad = (int(tokens[0, 1]), int(tokens[1, 3])), 50
    out = generate(params, PROMPTS, cfg, eos=eos, pad=pad, top_logprobs=2)
    counts = []
    for row in range(2):
        stops = [i for i, token in enumerate(tokens[row]) if token in eos]
        count = stops[0] + 1 if stops else NEW
        np.testing.assert_array_equal(out.tokens[row], [*tokens[row][:count], *[pad] * (NEW - count)])
        assert np.abs(out.logprobs[row, :count] - logprobs[row, :count]).max() < 1e-3  # as above
        assert not out.logprobs[row, count:].any() and out.top_logprobs[row, :count].all()
        assert (out.top_tokens[row, count:] == pad).all() and not out.top_logprobs[row, count:].any()
        counts.append(count)
    np.testing.assert_array_equal(out.lengths, counts)
    assert len(set(counts)) == 2 and min(counts) < NEW, "one row goes on after the other has ended"


EOS, MOST = 20, 90


@functools.cache
def counted():
    """A transform that changes nothing and notes that it has run, and the list of its notes."""
    notes = []

    def transform(logits):
        jax.debug.callback(lambda: notes.append(1))
        return logits

    return transform, notes


def ending_after(number):
    """Sampling whose row ends at exactly that many tokens."""
    transform, _ = counted()
    return jf.Sampling(temperature=0.0, logit_bias=((EOS, 1e4),), min_new_tokens=number - 1, transform=transform)


@pytest.mark.parametrize("ends", [(1, 1), (1, 7), (17, 2), (40, 41), (MOST + 1, 3)])
def test_work_stops_within_a_block_of_the_last_rows_end(ends):
    cfg, params = model("llama_mqa")
    _, notes = counted()
    notes.clear()
    out = jf.generate(
        params, PROMPTS, cfg, max_new_tokens=MOST, sampling=[ending_after(n) for n in ends], eos=(EOS, 21), pad=50
    )
    jax.effects_barrier()
    np.testing.assert_array_equal(out.lengths, np.minimum(ends, MOST))
    for row, end in enumerate(ends):
        assert (out.tokens[row, :end] == EOS).tolist() == [i == end - 1 for i in range(min(end, MOST))]
        assert (out.tokens[row, end:] == 50).all()
    last = min(max(ends), MOST)
    assert last <= len(notes) < last + loop.BLOCK
    assert loop.BLOCK < MOST / 2, "running to the end would be noticed"


# Compilation (rule 16)


def test_one_compilation_for_calls_of_one_shape():
    cfg, params = model("llama_gqa")

    def call(prompts, params, seed):
        drawn = jf.Sampling(temperature=0.7)
        return jf.generate(params, prompts, cfg, max_new_tokens=3, sampling=drawn, key=jax.random.key(seed)).tokens

    first = call([[5, 6, 7, 8], [9]], params, 0)
    count = _generate._cache_size()
    outs = [
        call([[5, 6, 7, 8], [9]], params, 1),
        call([[9, 8], [7, 6, 5, 4]], params, 0),
        call(np.ones((2, 11), int), params, 0),
    ]
    outs.append(call([[5, 6, 7, 8], [9]], jax.tree.map(lambda p: p * 1.5, params), 0))
    assert _generate._cache_size() == count
    assert all(not np.array_equal(out, first) for out in outs)


def test_prompts_of_many_lengths_compile_once_a_bucket():
    cfg = dataclasses.replace(tiny.PRESETS["llama_mqa"], n_layers=1, d_ff=24)  # used nowhere else: nothing is compiled yet
    params, lengths = tiny.drawn(cfg), [1, 2, 5, 9, 13, 15, 16, 17, 18, 19]
    before = jf.compilations()
    for length in lengths:
        jf.generate(params, [[5] * length], cfg, max_new_tokens=2)
    sizes = {(bucket(length), bucket(length + 2 - 1)) for length in lengths}
    assert 1 < len(sizes) < len(lengths) / 2
    assert jf.compilations() - before == len(sizes)


def test_buckets():
    sizes = [bucket(length) for length in range(1, 1000)]
    assert list(dict.fromkeys(sizes))[:12] == [16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112]
    for length, size in enumerate(sizes, 1):
        assert length <= size and (size - length < length / 4 or size == 16)


def largest_constant(lowered) -> int:
    """Bytes of the largest array written into a program."""
    texts = re.findall(r'dense<"0x([0-9A-Fa-f]*)"', lowered.as_text(debug_info=False))
    return max((len(text) // 2 for text in texts), default=0)


def test_weights_are_arguments():
    cfg, params = model("llama_gqa")
    methods, values = sampling.compile_sampling(GREEDY, 1, cfg.vocab_size)
    request = Request(cfg, max_new_tokens=3, cache_length=16, methods=methods)
    inputs = Inputs(jnp.ones((1, 16), jnp.int32), np.array([4], np.int32), jax.random.key(0), values, {})
    smallest_kernel = cfg.d_model * cfg.n_kv_heads * cfg.head_dim * 4
    closure = jax.jit(lambda inputs: _generate(params, inputs, request=request))
    assert largest_constant(closure.lower(inputs)) >= smallest_kernel, "a weight in the program is seen here"
    assert largest_constant(_generate.lower(params, inputs, request=request)) < smallest_kernel
