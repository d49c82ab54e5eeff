"""Sampling within generation: rows of their own, several outputs a prompt, reported probabilities, penalties, compilation."""

import dataclasses

import jax
import numpy as np
import pytest
import sampling_by_hand as by_hand
import tiny
from decoding import NEW, PROMPTS, argmax, inputs, model, next_logits, row_inputs, widths

import jaxformer as jf

pytestmark = pytest.mark.usefixtures("quick_compilation")
KEY = jax.random.key(3)


def generate(prompts, cfg, params, **given):
    return jf.generate(params, prompts, cfg, **({"max_new_tokens": NEW, "key": KEY} | given))


# Rows


def test_rows_of_different_sampling_are_each_row_alone():
    cfg, params = model("llama_gqa", layers=1)
    prompts = [PROMPTS[0]] * 4
    each = [
        jf.Sampling(temperature=0.0),
        jf.Sampling(temperature=2.0, top_k=4),
        jf.Sampling(temperature=1.5, top_p=0.9, presence_penalty=3.0, banned=(37, 2)),
        jf.Sampling(temperature=0.0, repetition_penalty=0.1),
    ]
    together = generate(prompts, cfg, params, sampling=each)
    for row, own in enumerate(each):
        alone = generate(prompts, cfg, params, sampling=own)  # every row like this one
        np.testing.assert_array_equal(together.tokens[row], alone.tokens[row])
        np.testing.assert_allclose(together.logprobs[row], alone.logprobs[row], atol=1e-5)  # another program, logits below 100
    assert len(np.unique(together.tokens, axis=0)) == len(each), "they differ in what they choose"


def test_a_sampled_row_does_not_depend_on_the_others():
    cfg, params = model("qwen3", layers=1)
    drawn = jf.Sampling(temperature=2.0, repetition_penalty=1.2)
    first = generate([[5, 9, 11], PROMPTS[1], [8]], cfg, params, sampling=drawn)
    others = generate([[4, 4], PROMPTS[1], [60, 61, 62, 63]], cfg, params, sampling=drawn)
    np.testing.assert_array_equal(first.tokens[1], others.tokens[1])
    assert not np.array_equal(first.tokens[0], others.tokens[0])
    same = generate([PROMPTS[1]] * 3, cfg, params, sampling=drawn)
    np.testing.assert_array_equal(same.tokens[1], first.tokens[1])
    assert len(np.unique(same.tokens, axis=0)) == 3, "each row draws with a key of its own"


def test_draws_of_all_rows_and_steps_are_independent():
    """Of a model whose logits are all the same: as often as chance has it, two rows or two steps draw the same."""
    cfg, params = model("llama_mqa", layers=1)
    rows, steps, uniform = 100, 40, jf.Sampling(transform=jax.numpy.zeros_like)
    tokens = np.asarray(generate([[5]], cfg, params, sampling=uniform, num_return=rows, max_new_tokens=steps).tokens)[0]
    counts = np.bincount(tokens.ravel(), minlength=cfg.vocab_size)
    expected = rows * steps / cfg.vocab_size
    assert ((counts - expected) ** 2 / expected).sum() < 66 + 5 * (2 * 66) ** 0.5  # chi-square of 66 degrees, five deviations
    for one, next_ in ((tokens[:, :-1], tokens[:, 1:]), (tokens[:-1], tokens[1:]), (tokens[:-1, 1:], tokens[1:, :-1])):
        share = 1 / cfg.vocab_size
        assert abs((one == next_).mean() - share) < 5 * (share / one.size) ** 0.5  # five deviations


def test_the_key_decides():
    cfg, params = model("qwen3", layers=1)
    draw = lambda seed: generate(PROMPTS, cfg, params, sampling=jf.Sampling(temperature=2.0), key=jax.random.key(seed))
    np.testing.assert_array_equal(draw(0).tokens, draw(0).tokens)
    assert not np.array_equal(draw(0).tokens, draw(1).tokens)


# Several outputs a prompt


@pytest.mark.parametrize("name", ["mistral", "transformer_base"])
def test_outputs_of_a_prompt_are_those_of_the_prompt_repeated(name, monkeypatch):
    cfg, params = model(name, layers=1)
    given, shapes = inputs(cfg), widths(monkeypatch)
    each = [jf.Sampling(temperature=2.0), jf.Sampling(temperature=1.5, repetition_penalty=1.5)]
    out = generate(PROMPTS, cfg, params, sampling=each, num_return=3, top_logprobs=2, eos=(40, 41), pad=50, **given)
    assert shapes == [(2, 16), (6, 1)], "prompts are read once, then six rows go on"
    assert out.tokens.shape == out.logprobs.shape == (2, 3, NEW) and out.lengths.shape == (2, 3)
    assert out.top_tokens.shape == out.top_logprobs.shape == (2, 3, NEW, 2)

    threefold = lambda rows: [row for row in rows for _ in range(3)]
    given = {key: value.repeat(3, axis=0) for key, value in given.items()}
    repeated = generate(
        threefold(PROMPTS), cfg, params, sampling=threefold(each), top_logprobs=2, eos=(40, 41), pad=50, **given
    )
    assert (6, 16) in shapes
    np.testing.assert_array_equal(out.tokens, repeated.tokens.reshape(2, 3, NEW))
    np.testing.assert_array_equal(out.lengths, repeated.lengths.reshape(2, 3))
    np.testing.assert_allclose(out.logprobs, repeated.logprobs.reshape(2, 3, NEW), atol=1e-4)  # sums in another order
    assert len(np.unique(repeated.tokens, axis=0)) == 6


def test_one_output_a_prompt_has_an_axis_too_if_asked_for():
    cfg, params = model("qwen3", layers=1)
    plain = generate(PROMPTS, cfg, params)
    one = generate(PROMPTS, cfg, params, num_return=1)
    np.testing.assert_array_equal(one.tokens, plain.tokens[:, None])
    assert plain.tokens.shape == (2, NEW) and one.lengths.shape == (2, 1)


# What the model gave each token


@pytest.mark.parametrize("name", ["gpt2", "mistral", "transformer_base"])
def test_probabilities_are_the_models_own(name):
    """Of every token and the most probable ones, whatever the sampling makes of them: by the uncached forward."""
    cfg, params = model(name, layers=1)
    drawn = jf.Sampling(temperature=3.0, top_k=20, banned=(3,), presence_penalty=1.0)
    out = generate(PROMPTS, cfg, params, sampling=drawn, top_logprobs=3, **inputs(cfg))
    for row, prompt in enumerate(PROMPTS):
        for at, token in enumerate(np.asarray(out.tokens[row])):
            logits = next_logits(params, cfg, [*prompt, *out.tokens[row, :at]], row_inputs(cfg, row))
            expected = np.asarray(jax.nn.log_softmax(logits))
            best = np.argsort(-expected)[:3]
            assert np.diff(np.sort(expected)[-4:]).min() > 1e-4, "a near tie"
            np.testing.assert_array_equal(out.top_tokens[row, at], best)
            # a log-probability is a difference of float32 numbers of the logits' size, below 100 here
            np.testing.assert_allclose(out.top_logprobs[row, at], expected[best], atol=1e-3)
            np.testing.assert_allclose(out.logprobs[row, at], expected[token], atol=1e-3)
    assert (np.asarray(out.tokens) != np.asarray(out.top_tokens)[..., 0]).any(), "not only the most probable were chosen"


# Methods that go by what has been read and written


WRITTEN = {  # sampling by prompt; 0 pads prompts, 12 and 13 end rows
    (5, 9, 11): jf.Sampling(temperature=0.0, repetition_penalty=3.0, logit_bias=((0, 3.0),)),
    (7, 3, 20, 41, 13, 8, 30): jf.Sampling(temperature=0.0, presence_penalty=2.0, frequency_penalty=1.5),
    (6,): jf.Sampling(temperature=0.0, logit_bias=((12, 30.0),), min_new_tokens=3),
    (7, 9, 9, 7): jf.Sampling(temperature=0.0, repetition_penalty=0.4, frequency_penalty=2.0, banned=(7,)),
    (8, 2): jf.Sampling(temperature=0.0, logit_bias=((30, 10.0),), frequency_penalty=4.0),
}


def test_penalties_go_by_the_prompt_and_the_output_without_padding():
    """Greedy, so that each token is the best by the methods' definitions and the uncached forward."""
    cfg, params = model("qwen2_5", layers=1)
    out = generate(list(map(list, WRITTEN)), cfg, params, sampling=list(WRITTEN.values()), eos=(12, 13), pad=50)
    counted = []
    for row, (prompt, own) in enumerate(WRITTEN.items()):
        written, without = [], []
        while len(written) < NEW and not {12, 13} & set(written):
            logits = next_logits(params, cfg, [*prompt, *written], {})
            p, margin = by_hand.distribution(logits, own, prompt, written, (12, 13))
            assert margin > 1e-3, "a near tie"
            counted.append(by_hand.distribution(logits, own, (*prompt, 0), written, (12, 13))[0].argmax() != p.argmax())
            without.append(argmax(logits))
            written.append(int(p.argmax()))
        np.testing.assert_array_equal(out.tokens[row], written + [50] * (NEW - len(written)))
        assert without != written, "the methods matter"
    assert out.lengths[2] == 4 and out.tokens[2, 3] == 12, "the end comes when it may"
    assert 1 < out.tokens[4].tolist().count(30) < NEW, "a penalty by frequency grows"
    assert any(counted), "the id that pads prompts would be another choice, were it read"


# Compilation (rule 16)


def test_methods_in_use_decide_what_is_compiled_and_values_do_not():
    cfg = dataclasses.replace(tiny.PRESETS["llama_mqa"], n_layers=1, d_ff=40)  # used nowhere else: nothing is compiled yet
    params, start = tiny.drawn(cfg), jf.compilations()

    def compiled(*each):
        """How many programs have been compiled here, after two rows of these samplings."""
        generate(PROMPTS, cfg, params, sampling=each[0] if len(each) == 1 else list(each), max_new_tokens=2)
        return jf.compilations() - start

    for fields in ({"temperature": 0.5, "top_p": 0.3}, {"temperature": 2, "top_p": 0.9}, {"top_p": 0.0}):
        assert compiled(jf.Sampling(**fields)) == 1
    mixed = (
        jf.Sampling(temperature=0, repetition_penalty=2.0, banned=(3,)),
        jf.Sampling(top_k=5, min_new_tokens=1, logit_bias=((4, 1.0),)),
    )
    assert compiled(*mixed) == compiled(*mixed[::-1]) == 2
    others = (jf.Sampling(temperature=0.3, top_k=3, repetition_penalty=1.1, min_new_tokens=9), jf.Sampling(banned=(8, 9)))
    assert compiled(*others) == 2
    assert compiled(jf.Sampling(temperature=0)) == 3
    assert compiled(jf.Sampling(temperature=0, top_k=3, top_p=0.5)) == 3, "greedy as before"
    assert compiled(jf.Sampling(temperature=0, presence_penalty=1.0)) == 4
