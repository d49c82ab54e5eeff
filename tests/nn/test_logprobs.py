"""Log-probabilities of given tokens: those of the forward's logits; padding, packing, gradients, memory."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxformer as jf

CFG = dataclasses.replace(tiny.PRESETS["llama_gqa"], n_layers=1)
CHUNK = 4  # of 9 positions: two chunks and a part of one
NAMES = ("gpt2", "mistral", "deepseek", "transformer_base")

logprobs = jax.jit(jf.logprobs, static_argnums=2, static_argnames="chunk")


def by_forward(params, tokens, cfg, **given):
    """[B, T]: log-softmax of all logits, then the entry of each token after the first."""
    logp = np.asarray(jax.nn.log_softmax(jax.jit(jf.forward, static_argnums=2)(params, tokens, cfg, **given)))
    rows, at = np.arange(len(tokens))[:, None], np.arange(tokens.shape[1] - 1)
    return np.pad(logp[rows, at, tokens[:, 1:]], ((0, 0), (1, 0)))


def close(actual, expected):
    """To 1e-6 of the numbers compared, which are about 1 to 100."""
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=5e-6)


@pytest.mark.parametrize(("name", "chunk"), [*((name, CHUNK) for name in NAMES), ("gpt2", 1), ("gpt2", 9), ("gpt2", 128)])
def test_they_are_the_log_softmax_of_the_forward(name, chunk):
    cfg = tiny.PRESETS[name]
    params, tokens, given = tiny.drawn(cfg), tiny.tokens(cfg), tiny.inputs(cfg)
    expected = by_forward(params, tokens, cfg, **given)
    assert np.abs(expected[:, 1:] - expected[:, :-1]).max() > 1, "another position's would be seen"
    found = logprobs(params, tokens, cfg, chunk=chunk, **given)
    assert found.shape == tokens.shape and found.dtype == jnp.float32
    close(found, expected)
    assert not found[:, 0].any() and (found[:, 1:] < 0).all()


def test_all_next_tokens_have_probability_one_together():
    params, start = tiny.drawn(CFG), tiny.tokens(CFG, 1, 5)
    tokens = np.concatenate([np.repeat(start, CFG.vocab_size, 0), np.arange(CFG.vocab_size)[:, None]], axis=1)
    assert float(jnp.exp(logprobs(params, tokens, CFG, chunk=CHUNK)[:, -1]).sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("holes", [[], [0, 1], [7, 8], [3, 4], [0, 4, 8]], ids=str)
def test_padding_anywhere_changes_nothing_and_scores_0(holes):
    params = tiny.drawn(CFG)
    tokens = tiny.tokens(CFG, 2)
    valid = ~np.isin(np.arange(9), holes)
    expected = np.asarray(logprobs(params, tokens[:, valid], CFG, chunk=CHUNK))
    found = np.asarray(logprobs(params, tokens, CFG, valid=np.array([valid, valid]), chunk=CHUNK))
    unmasked = np.asarray(logprobs(params, tokens, CFG, chunk=CHUNK))
    if holes and holes[0] < 7:
        assert np.abs(unmasked[:, valid] - expected).max() > 0.1, "padding would be seen, but on the right"
    assert unmasked[:, ~valid][:, -1:].all()
    close(found[:, valid], expected)
    assert not found[:, ~valid].any()


def test_packed_documents_are_those_alone():
    params, tokens = tiny.drawn(CFG), tiny.tokens(CFG, 2)
    segments = np.array([[1, 1, 1, 2, 2, 3, 4, 4, 4], [1, 1, 1, 1, 1, 1, 1, 2, 2]])
    found = np.asarray(logprobs(params, tokens, CFG, segments=segments, chunk=CHUNK))
    together = np.asarray(logprobs(params, tokens, CFG, chunk=CHUNK))
    assert np.abs(together - found)[segments > 1].max() > 0.1, "what stands in front would be seen"
    for row in range(2):
        for document in np.unique(segments[row]):
            here = segments[row] == document
            alone = logprobs(params, tokens[row : row + 1, here], CFG, chunk=CHUNK)
            close(found[row, here], alone[0])
            assert found[row, here.argmax()] == 0


def test_of_an_encoder_decoder_padding_of_the_source_and_of_the_target_change_nothing():
    cfg = dataclasses.replace(tiny.PRESETS["transformer_base"], n_layers=1, encoder_layers=1)
    params, given, tokens = tiny.drawn(cfg), tiny.inputs(cfg), tiny.tokens(cfg)
    tokens[:, 0] = cfg.start_token
    row, valid = given["source"][:1, :5], np.arange(9)[None] < 6
    alone = np.asarray(logprobs(params, tokens[:1, :6], cfg, source=row, chunk=CHUNK))
    found = np.asarray(
        logprobs(params, tokens[:1], cfg, source=given["source"][:1], source_valid=given["source_valid"][:1], valid=valid)
    )
    other = np.asarray(logprobs(params, tokens[:1, :6], cfg, source=given["source"][1:, :5]))
    assert np.abs(other - alone).max() > 0.1, "the source is read"
    close(found[:, :6], alone)
    assert not found[:, 6:].any()


def test_dropout_is_that_of_the_forward():
    cfg = tiny.with_dropout(CFG, 0.5)
    params, tokens, key = tiny.drawn(cfg), tiny.tokens(cfg), jax.random.key(3)
    expected = by_forward(params, tokens, cfg, key=key)
    assert np.abs(expected - by_forward(params, tokens, cfg)).max() > 0.1
    close(logprobs(params, tokens, cfg, key=key, chunk=CHUNK), expected)


def test_gradients_are_those_of_the_forward():
    params, tokens = tiny.drawn(CFG), tiny.tokens(CFG)
    weights = np.random.default_rng(0).standard_normal(tokens.shape)

    def plain(params):
        logp = jax.nn.log_softmax(jf.forward(params, tokens, CFG))
        return (jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0] * weights[:, 1:]).sum()

    expected = jax.jit(jax.grad(plain))(params)
    found = jax.jit(jax.grad(lambda params: (jf.logprobs(params, tokens, CFG, chunk=CHUNK) * weights).sum()))(params)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(expected))
    # float32 sums in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max()), found, expected)


# Memory

ROWS, LENGTH, VOCAB = 2, 96, 509


def logits_in(chunk):
    """Lengths T of the arrays [B, T, V], in any order of axes, in the compiled gradient, and bytes of its temporaries."""
    cfg = jf.presets.llama(vocab_size=VOCAB, d_model=8, n_layers=1, n_heads=1, d_ff=8, max_length=LENGTH)
    tokens = tiny.tokens(cfg, ROWS, LENGTH)
    run = jax.jit(jax.value_and_grad(lambda params: jf.logprobs(params, tokens, cfg, chunk=chunk).sum()))
    compiled = run.lower(tiny.drawn(cfg)).compile()
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", compiled.as_text())}
    sizes = {int(np.prod(shape)) // VOCAB for shape in shapes if VOCAB in shape}
    return sizes, compiled.memory_analysis().temp_size_in_bytes


def test_the_logits_of_all_positions_never_exist():
    whole, chunked = logits_in(LENGTH), logits_in(8)
    assert ROWS * LENGTH in whole[0] and max(whole[0]) == ROWS * LENGTH, "without chunks they do"
    assert ROWS * 8 in chunked[0] and max(chunked[0]) == ROWS * 8
    assert chunked[1] < ROWS * LENGTH * VOCAB * 4 < whole[1]


# Captured, and refused


def test_captured_logits_are_those_of_all_positions():
    params, tokens = tiny.drawn(CFG), tiny.tokens(CFG)
    run = jf.capture(lambda params: jf.logprobs(params, tokens, CFG, chunk=CHUNK), "logits")
    found, seen = jax.jit(run)(params)
    assert seen["logits"].shape == (2, 9, CFG.vocab_size)
    close(found, logprobs(params, tokens, CFG, chunk=CHUNK))


def test_an_id_outside_the_vocabulary():
    params, tokens = tiny.drawn(CFG), tiny.tokens(CFG)
    for wrong in (CFG.vocab_size, -1):
        tokens[0, 4] = wrong
        with pytest.raises(ValueError, match=rf"tokens\[0, 4\] = {wrong} is outside the vocabulary"):
            jf.logprobs(params, tokens, CFG)
        found = np.asarray(logprobs(params, tokens, CFG, chunk=CHUNK))
        assert np.isnan(found[0, 1:]).all() and np.isfinite(found[1]).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"chunk": 0}, "chunk=0 must be an integer"),
        ({"chunk": True}, "chunk=True"),
        ({"valid": np.ones((2, 8), bool)}, "shape"),
    ],
)
def test_what_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        jf.logprobs(tiny.drawn(CFG), tiny.tokens(CFG), CFG, **given)


def test_a_model_that_is_not_causal_or_has_no_head():
    for fields, message in (({"causal": False}, "not causal"), ({"has_head": False}, "no head")):
        cfg = dataclasses.replace(CFG, **fields)
        with pytest.raises(ValueError, match=message):
            jf.logprobs(tiny.drawn(cfg), tiny.tokens(cfg), cfg)
