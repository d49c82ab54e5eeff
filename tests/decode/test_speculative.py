"""Speculative decoding: the tokens of plain greedy, the distribution of plain sampling, and fewer forwards."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxformer as jf
from jaxformer.decode import propose
from jaxformer.decode.drafts import PromptLookup

pytestmark = pytest.mark.usefixtures("quick_compilation")
PROMPTS = [[5, 9, 11], [7, 3, 20, 41, 13, 8, 30, 7, 3, 20]]
NEW = 12


@functools.cache
def model(name):
    cfg = tiny.PRESETS[name]
    return cfg, tiny.drawn(cfg)


def near(params, share, seed=3):
    """Other parameters that are often of the same opinion."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: p + share * rng.standard_normal(p.shape).astype(p.dtype), params)


@functools.cache
def plain(name):
    cfg, params = model(name)
    return jf.generate(params, PROMPTS, cfg, max_new_tokens=NEW, top_logprobs=2, **tiny.inputs(cfg))


DRAFTS = {
    "look-up": lambda cfg, params: jf.PromptLookup(ahead=3, ngram=2),
    "another model": lambda cfg, params: jf.DraftModel(near(params, 0.004), cfg, ahead=3),
    "the model itself": lambda cfg, params: jf.DraftModel(params, cfg, ahead=4),
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", ["gpt2", "llama_gqa", "mistral", "mixed_windows", "transformer_base"])
def test_greedy_is_plain_greedy(name, draft):
    """Ragged prompts, rings that must take tokens back, learned positions up to their table's end, an encoder."""
    cfg, params = model(name)
    expected = plain(name)
    out = jf.generate(
        params, PROMPTS, cfg, max_new_tokens=NEW, top_logprobs=2, draft=DRAFTS[draft](cfg, params), **tiny.inputs(cfg)
    )
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    np.testing.assert_array_equal(out.lengths, expected.lengths)
    np.testing.assert_array_equal(out.top_tokens, expected.top_tokens)
    # a chunk sums in another order than a step: float32 roundings of logits below 100
    np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=1e-4, rtol=0)
    acceptance = np.asarray(out.acceptance)
    assert acceptance.shape == (2,) and ((acceptance >= 0) & (acceptance <= 1)).all()
    if draft == "the model itself":
        np.testing.assert_array_equal(acceptance, 1)


def test_some_guesses_are_right_and_some_are_not():
    """Otherwise the tests above would show one half of the rule only."""
    cfg, params = model("llama_gqa")
    out = jf.generate(params, PROMPTS, cfg, max_new_tokens=NEW, draft=jf.DraftModel(near(params, 0.02), cfg, ahead=3))
    assert 0 < float(out.acceptance.min()) < 1
    np.testing.assert_array_equal(out.tokens, plain("llama_gqa").tokens)


def test_an_end_among_the_guesses_ends_the_row():
    cfg, params = model("llama_gqa")
    tokens = np.asarray(plain("llama_gqa").tokens)
    eos = (int(tokens[0, 2]), int(tokens[1, 5]))
    expected = jf.generate(params, PROMPTS, cfg, max_new_tokens=NEW, eos=eos, pad=1)
    assert len(set(np.asarray(expected.lengths).tolist())) == 2 and int(expected.lengths.max()) < NEW
    for draft in (jf.DraftModel(params, cfg, ahead=5), jf.PromptLookup()):
        out = jf.generate(params, PROMPTS, cfg, max_new_tokens=NEW, eos=eos, pad=1, draft=draft)
        np.testing.assert_array_equal(out.tokens, expected.tokens)
        np.testing.assert_array_equal(out.lengths, expected.lengths)
        np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=1e-4)  # float32, other orders of sums


def test_penalties_count_guesses_that_are_not_settled_yet():
    cfg, params = model("llama_gqa")
    sampling = jf.Sampling(temperature=0.0, repetition_penalty=1.5, frequency_penalty=2.0, min_new_tokens=4)
    eos = (int(plain("llama_gqa").tokens[0, 1]),)
    expected = jf.generate(params, PROMPTS, cfg, max_new_tokens=NEW, sampling=sampling, eos=eos)
    assert not np.array_equal(expected.tokens, plain("llama_gqa").tokens), "they change something"
    for draft in (jf.DraftModel(near(params, 0.004), cfg, ahead=4), jf.PromptLookup(ahead=4)):
        out = jf.generate(params, PROMPTS, cfg, max_new_tokens=NEW, sampling=sampling, eos=eos, draft=draft)
        np.testing.assert_array_equal(out.tokens, expected.tokens)


def test_up_to_the_last_row_of_a_learned_table():
    cfg, params = model("gpt2")
    prompt = tiny.tokens(cfg, 1, cfg.max_length - 5)
    expected = jf.generate(params, prompt, cfg, max_new_tokens=6)
    assert np.isfinite(np.asarray(expected.logprobs)).all()
    out = jf.generate(params, prompt, cfg, max_new_tokens=6, draft=jf.DraftModel(near(params, 0.004), cfg, ahead=4))
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    with pytest.raises(ValueError, match="past the learned table"):
        jf.generate(params, prompt, cfg, max_new_tokens=7, draft=jf.PromptLookup())


# The look-up itself


@pytest.mark.parametrize(
    ("text", "ngram", "guesses", "offered"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 3, [9, 1, 2], 3),  # after the earlier 1 2 3
        ([2, 3, 8, 1, 3, 7, 2, 3], 2, [8, 1, 3], 3),  # the longer match wins over the later one
        ([3, 8, 1, 3, 7, 5, 3], 1, [7, 5, 3], 3),  # the latest of equals
        ([5, 5], 3, [5, None, None], 1),  # what follows may be the end itself; no more is known
        ([1, 2, 3], 3, [None] * 3, 0),  # nothing matches
    ],
)
def test_what_look_up_guesses(text, ngram, guesses, offered):
    padded = jnp.array([text + [0] * (10 - len(text))])
    found, count = propose.look_up(padded, jnp.array([len(text)]), PromptLookup(3, ngram=ngram))
    assert int(count[0]) == offered
    assert [int(f) if g is not None else None for f, g in zip(found[0], guesses, strict=True)] == guesses


def test_repeated_text_is_guessed_in_few_forwards():
    """A model that sees one token only soon goes in a circle, which look-up guesses right."""
    cfg = jf.presets.llama(vocab_size=67, d_model=32, n_layers=1, n_heads=2, window=1, max_length=96)
    params, calls = tiny.drawn(cfg), []

    def count(logits):
        jax.debug.callback(lambda: calls.append(1))
        return logits

    sampling = jf.Sampling(temperature=0.0, transform=count)
    start = np.asarray(jf.generate(params, [[5]], cfg, max_new_tokens=40).tokens)
    expected = jf.generate(params, start, cfg, max_new_tokens=24)
    out = jf.generate(params, start, cfg, max_new_tokens=24, sampling=sampling, draft=jf.PromptLookup(ahead=5))
    jax.effects_barrier()
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    # one call for the first token, then one for each of the six positions that a forward judges: 24 = 1 + 3·6 + 5
    assert len(calls) == 1 + 4 * 6
    assert float(out.acceptance[0]) == 1.0


# Sampling: the same distribution


def cells(params, cfg, sampling, key, draft):
    out = jf.generate(
        params, [[1, 2, 1]], cfg, max_new_tokens=3, sampling=sampling, key=key, num_return=DRAWS, eos=(5,), draft=draft
    )
    return collections.Counter(map(tuple, np.asarray(out.tokens)[0].tolist())), out.acceptance


def exact(params, cfg, sampling):
    """Probability of every output, by the uncached forward and the definition of each method: temperature, then top-p."""
    found = {}

    def extend(prefix, probability):
        if len(prefix) == 3 or prefix[-1:] == (5,):
            found[prefix + (0,) * (3 - len(prefix))] = probability
            return
        logits = np.asarray(forward(params, np.array([[1, 2, 1, *prefix]]), cfg), np.float64)[0, -1] / sampling.temperature
        p = np.exp(logits - logits.max())
        p /= p.sum()
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= sampling.top_p]] = 0
        for token in np.flatnonzero(p):
            extend((*prefix, int(token)), probability * p[token] / p.sum())

    extend((), 1.0)
    return found


forward = jax.jit(jf.forward, static_argnums=2)
DRAWS = 20_000


def chi_square_excess(counts, expected, total):
    """How many standard deviations the statistic lies above its mean, by Wilson and Hilferty's cube root."""
    cells = {cell: p * total for cell, p in expected.items() if p * total >= 5}
    rare = total - sum(cells.values())
    statistic = sum((counts[cell] - n) ** 2 / n for cell, n in cells.items())
    if rare > 5:
        statistic += (total - sum(counts[cell] for cell in cells) - rare) ** 2 / rare
    freedom = len(cells) - (rare <= 5)
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5


@pytest.mark.parametrize("draft", ["look-up", "another model"])
def test_samples_have_the_distribution_of_plain_sampling(draft):
    cfg = jf.presets.llama(vocab_size=6, d_model=16, n_layers=1, n_heads=2, max_length=32)
    params = tiny.drawn(cfg)
    sampling = jf.Sampling(temperature=1.3, top_p=0.9)
    expected = exact(params, cfg, sampling)
    assert sum(expected.values()) == pytest.approx(1)
    drafts = {"look-up": jf.PromptLookup(ahead=2, ngram=2), "another model": jf.DraftModel(near(params, 0.3), cfg, ahead=2)}
    counts, acceptance = cells(params, cfg, sampling, jax.random.key(1), drafts[draft])
    assert 0.05 < float(acceptance.mean()) < 0.95, "both branches of the rule are taken"
    assert set(counts) <= set(expected)
    # 5 standard deviations: one run in three million would fail by chance, and the key is fixed
    assert chi_square_excess(counts, expected, DRAWS) < 5
    other = exact(params, cfg, dataclasses.replace(sampling, temperature=1.1))
    assert chi_square_excess(counts, other, DRAWS) > 5, "a slightly different distribution is told apart"


def test_wrong_drafts_are_refused():
    cfg, params = model("llama_gqa")
    other = dataclasses.replace(cfg, vocab_size=50)
    with pytest.raises(ValueError, match="vocabulary of 50, but the model has 67"):
        jf.generate(params, PROMPTS, cfg, max_new_tokens=3, draft=jf.DraftModel(params, other))
    with pytest.raises(ValueError, match="ahead=0 must be at least 1"):
        jf.PromptLookup(ahead=0)
    short = dataclasses.replace(tiny.PRESETS["gpt2"], max_length=12)
    with pytest.raises(ValueError, match="past the learned table of max_length=12"):
        jf.generate(params, PROMPTS, cfg, max_new_tokens=5, draft=jf.DraftModel(tiny.drawn(short), short))
    with pytest.raises(ValueError, match="draft"):
        jf.generate(params, PROMPTS, cfg, max_new_tokens=5, draft=(params, cfg))
