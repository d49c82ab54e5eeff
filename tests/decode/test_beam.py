"""Beam search: against its rules in plain Python, all sequences there are, and greedy; rows, padding, windows, errors."""

import dataclasses
import itertools

import beams
import jax
import numpy as np
import pytest
import tiny
from beams import EOS, PAD, PROMPTS, SOURCES, Rules

import jaxformer as jf
from jaxformer.decode import beam
from jaxformer.nn.cache import Cache

pytestmark = pytest.mark.usefixtures("quick_compilation")
# a score is a sum of up to six float32 log-probabilities, each known to some roundings of the largest logit, about 20
CLOSE = {"rtol": 0, "atol": 1e-4}


def inputs(name):
    """The prompts, of unequal lengths; or the sources, padded."""
    if name != "paired":
        return {"prompts": PROMPTS}
    width = max(map(len, SOURCES))
    valid = np.array([[i < len(source) for i in range(width)] for source in SOURCES])
    return {"prompts": None, "source": np.array([s + [5] * (width - len(s)) for s in SOURCES]), "source_valid": valid}


def run(name, rules=Rules(), **given) -> jf.Beams:  # noqa: B008
    cfg, params = beams.model(name)
    settings = dataclasses.asdict(rules) | {"num_return": rules.num_beams, "pad": PAD}
    return jf.beam_search(params, cfg=cfg, **inputs(name) | settings | given)


def assert_same(found: jf.Beams, expected: list[beams.Found], pad=PAD):
    length = found.tokens.shape[-1]
    tokens = [[[*t, *[pad] * (length - len(t))] for t in row.tokens] for row in expected]
    np.testing.assert_array_equal(found.tokens, tokens)
    np.testing.assert_array_equal(found.lengths, [[len(t) for t in row.tokens] for row in expected])
    np.testing.assert_allclose(found.scores, [row.scores for row in expected], **CLOSE)
    assert all(len(set(row.tokens)) == len(row.tokens) for row in expected)
    assert (np.diff(found.scores) < 0).all()


def assert_equal(found: jf.Beams, expected: jf.Beams):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# Against the rules

STOPPINGS = (True, False, "never")
PENALTIES = (-0.5, 0.0, 1.0, 2.0)
SETTINGS = list(itertools.product(STOPPINGS, (1.0, 2.0))) + [(True, -0.5), (False, -0.5), (False, 0.0)]


@pytest.mark.parametrize(("early_stopping", "length_penalty"), SETTINGS)
def test_every_setting_is_what_its_rules_say(early_stopping, length_penalty):
    rules = Rules(length_penalty=length_penalty, early_stopping=early_stopping)
    expected = beams.expected("llama", rules)
    assert all(row.moved for row in expected), "keys and values have to follow their beams"
    assert_same(run("llama", rules), expected)


def test_every_setting_changes_something():
    found = {(p, s): [row.tokens for row in beams.expected("llama", Rules(length_penalty=p, early_stopping=s))]
             for p in PENALTIES for s in STOPPINGS}  # fmt: skip
    for penalty in PENALTIES:
        assert found[penalty, True] != found[penalty, False]
        # without a reward for length, no hypothesis is ever better than now, and the two are one rule
        assert (found[penalty, False] != found[penalty, "never"]) == (penalty > 0)
    for stopping, (one, other) in itertools.product(STOPPINGS, itertools.pairwise(PENALTIES)):
        assert found[one, stopping] != found[other, stopping]
    lengths = {len(tokens) for row in found[1.0, False] for tokens in row}
    assert len(lengths) >= 4


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("windowed", Rules(length_penalty=2.0, early_stopping="never")),
        ("paired", Rules(num_beams=2, length_penalty=-1.0, early_stopping="never")),  # shorter is better: "now" is the best
        ("paired", Rules(num_beams=5, length_penalty=0.0)),
        ("llama", Rules(num_beams=1, early_stopping="never")),
        ("llama", Rules(num_beams=6, max_new_tokens=1)),
        ("llama", Rules(num_beams=2, max_new_tokens=5, eos=())),
    ],
)
def test_windows_and_encoders_and_numbers_of_beams(name, rules):
    """A window's cache is a ring that the prompts fill more than once; sources and prompts are of unequal lengths."""
    expected = beams.expected(name, rules)
    assert len({row.tokens for row in expected}) > 5, "rows differ"
    if name == "windowed":
        assert beams.expected(name, rules, window=None) != expected
    assert_same(run(name, rules), expected)


def test_banned_ids_are_never_chosen():
    """The others' scores stay the model's own. With the last two ids banned, beams and end tokens take all there are."""
    for rules in (Rules(num_beams=3, banned=(4, 6)), Rules(num_beams=4, banned=(5, 6))):
        free = beams.expected("llama", dataclasses.replace(rules, banned=()))
        assert sum(bool(set(rules.banned) & set(sum(row.tokens, ()))) for row in free) >= 3
        assert_same(run("llama", rules), beams.expected("llama", rules))


def test_several_end_tokens_and_another_padding():
    rules = Rules(eos=(EOS, 3, 5))
    expected = beams.expected("llama", rules)
    last = {tokens[-1] for row in expected for tokens in row.tokens if len(tokens) < rules.max_new_tokens}
    assert last == {EOS, 3, 5}
    assert_same(run("llama", rules, pad=5), expected, pad=5)
    one = run("llama", Rules())
    assert_equal(run("llama", eos=EOS), one)
    assert_equal(run("llama", eos=np.int64(EOS)), one)


def test_what_is_not_finished_counts_at_the_last_token():
    rules = Rules(length_penalty=2.0, early_stopping="never")
    tokens = [t for row in beams.expected("llama", rules) for t in row.tokens]
    cut = [t for t in tokens if len(t) == rules.max_new_tokens and t[-1] != EOS]
    assert cut and any(t[-1] == EOS for t in tokens)
    assert set(cut) <= {tuple(t) for t in np.asarray(run("llama", rules).tokens).reshape(-1, rules.max_new_tokens).tolist()}


def test_fewer_are_the_first_of_more():
    whole, two = run("llama"), run("llama", num_return=2)
    assert_equal(two, jax.tree.map(lambda x: x[:, :2], whole))


# Against all sequences and against greedy


def all_sequences(scorer, tokens, length, penalty):
    """``(score, tokens)`` of everything that ends, or has ``length`` tokens: best first."""
    found, level = [], [(0.0, ())]
    for n in range(1, length + 1):
        logps = scorer([prefix for _, prefix in level])
        longer = [(s + logp[t], (*prefix, t)) for (s, prefix), logp in zip(level, logps, strict=True) for t in tokens]
        over = lambda t: t[-1] == EOS or len(t) == length
        found += [(s / n**penalty, t) for s, t in longer if over(t)]
        level = [(s, t) for s, t in longer if not over(t)]
    return sorted(found, reverse=True)


def test_with_enough_beams_the_best_of_all_sequences_are_found():
    """Of 90 tokens five are possible, so that 80 beams hold all 64 prefixes of three tokens that have not ended."""
    possible, prompt, penalty, n = range(1, 6), [4, 5], 2.0, 10
    cfg = dataclasses.replace(beams.CONFIGS["llama"], vocab_size=90, head_bias=True)
    params = tiny.drawn(cfg, seed=3)
    bias = np.where(np.isin(np.arange(90), possible), 0.0, -1000.0)
    params |= {"head": {"kernel": 4 * params["head"]["kernel"], "bias": bias}}
    best = all_sequences(beams.Scorer(cfg, params, prompt), possible, 4, penalty)
    assert len(best) == 1 + 4 + 16 + 4**3 * 5
    assert -np.diff([score for score, _ in best[: n + 1]]).max() > 1e-4, "no two scores tie"
    settings = {"max_new_tokens": 4, "eos": EOS, "length_penalty": penalty}
    greedy = jf.generate(params, [prompt], cfg, max_new_tokens=4, eos=EOS).tokens[0].tolist()
    assert greedy[: len(best[0][1])] != list(best[0][1])
    out = jf.beam_search(params, [prompt], cfg, num_beams=80, num_return=n, **settings)
    found = [tuple(t[:length].tolist()) for t, length in zip(np.asarray(out.tokens[0]), out.lengths[0], strict=True)]
    assert found == [tokens for _, tokens in best[:n]]
    np.testing.assert_allclose(out.scores[0], [score for score, _ in best[:n]], **CLOSE)


def test_one_beam_is_greedy():
    cfg, params = beams.model("llama")
    greedy = jf.generate(params, cfg=cfg, max_new_tokens=6, eos=EOS, pad=PAD, **inputs("llama"))
    three, one = (run("llama", Rules(num_beams=n, length_penalty=2.0)) for n in (3, 1))
    assert (three.tokens[:, :1] != one.tokens).any(), "more beams find something else"
    np.testing.assert_array_equal(one.tokens[:, 0], greedy.tokens)
    np.testing.assert_array_equal(one.lengths[:, 0], greedy.lengths)
    np.testing.assert_allclose(one.scores[:, 0], greedy.logprobs.sum(-1) / greedy.lengths**2.0, **CLOSE)


# Rows, padding, chunks, the cache


def test_rows_do_not_see_each_other():
    """Neither their order nor what stands in the others changes a bit of a row, which may end before them or after."""
    whole, order = run("llama"), np.arange(len(PROMPTS))[::-1]
    assert len(set(np.asarray(whole.lengths).max(1).tolist())) > 2
    assert_equal(run("llama", prompts=[PROMPTS[i] for i in order]), jax.tree.map(lambda x: x[order], whole))
    for row in (1, 3):
        others = [prompt if i == row else [2, 5, 5, 5, 5] for i, prompt in enumerate(PROMPTS)]
        assert_equal(*(jax.tree.map(lambda x: x[row], out) for out in (run("llama", prompts=others), whole)))  # noqa: B023


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts_are_the_lists(side):
    width = max(map(len, PROMPTS))
    ids, valid = np.full((len(PROMPTS), width), 5), np.zeros((len(PROMPTS), width), bool)
    for row, prompt in enumerate(PROMPTS):
        at = slice(len(prompt)) if side == "right" else slice(width - len(prompt), None)
        ids[row, at], valid[row, at] = prompt, True
    whole = run("llama")
    assert (run("llama", prompts=ids).tokens != whole.tokens).any(), "padding would be seen"
    assert_equal(run("llama", prompts=ids, valid=valid), whole)


def test_padding_of_the_source_is_not_seen():
    given = inputs("paired")
    whole, unmasked = run("paired"), run("paired", source_valid=None)
    assert (unmasked.tokens != whole.tokens).any()
    assert_equal(run("paired", source=np.where(given["source_valid"], given["source"], 3)), whole)
    assert_same(whole, beams.expected("paired", Rules()))


@pytest.mark.parametrize("name", ["llama", "windowed"])
def test_a_prompt_read_in_chunks_is_the_whole(name):
    """Of two tokens, fewer than the longest prompts have."""
    assert_same(run(name, prefill_chunk=2), beams.expected(name, Rules()))


def test_a_cache_of_another_dtype_is_used():
    exact, rounded = run("llama"), run("llama", cache_dtype="bfloat16")
    gap = np.abs(np.asarray(rounded.scores[:, 0] - exact.scores[:, 0]))
    assert 1e-4 < gap.max() < 0.2  # keys and values rounded by 2^-9; scores of size 1 to 10


def test_the_cache_follows_the_beams(monkeypatch):
    """Left as it is when beams change places, it gives something else: the comparisons above would see it."""
    whole, take, search = run("llama"), Cache.take, beam._search.__wrapped__
    monkeypatch.setattr(Cache, "take", lambda self, rows, source=True: take(self, rows) if source else self)
    monkeypatch.setattr(
        beam, "_search", jax.jit(lambda *given, request: search(*given, request=request), static_argnames="request")
    )
    assert (run("llama").tokens != whole.tokens).any(axis=(1, 2)).sum() > 3


# What is refused

WRONG = [
    ({"num_beams": 0}, "num_beams=0 must be an integer of at least 1"),
    ({"num_beams": 2.0}, r"num_beams=2\.0"),
    ({"num_beams": True}, "num_beams=True"),
    ({"num_return": 0}, "num_return=0"),
    ({"num_return": 4}, "num_return=4 is more than num_beams=3"),
    ({"num_beams": 7}, "num_beams=7 and 1 end ids are too many for a vocabulary of 7"),
    ({"num_beams": 5, "banned": (5, 6, 6)}, "num_beams=5 and 1 end ids are too many for .* 7, of which 2 are banned"),
    ({"banned": (7,)}, "banned id 7 is outside the vocabulary of 7"),
    ({"num_beams": 6, "eos": (1, 2)}, "num_beams=6 and 2 end ids are too many"),
    ({"early_stopping": "always"}, "early_stopping='always' must be True, False or 'never'"),
    ({"early_stopping": None}, "early_stopping=None"),
    ({"early_stopping": 1}, "early_stopping=1"),
    ({"length_penalty": float("nan")}, "length_penalty=nan must be a finite number"),
    ({"length_penalty": float("inf")}, "length_penalty=inf"),
    ({"length_penalty": None}, "length_penalty=None"),
    ({"length_penalty": "1"}, "length_penalty='1'"),
    ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ({"prefill_chunk": 0}, "prefill_chunk=0"),
    ({"eos": 7}, "eos id 7 is outside the vocabulary of 7"),
    ({"pad": -1}, "pad id -1 is outside"),
    ({"prompts": [[3], []]}, "prompt 1 is empty"),
    ({"prompts": [[3, 7]]}, "prompts.*= 7 is outside the vocabulary of 7"),
    ({"source": [[1]]}, "no encoder"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_makes_no_sense_is_refused(change, message):
    given = {"num_return": 1} if "num_beams" in change else {}
    with pytest.raises(ValueError, match=message):
        run("llama", **given | change)


def test_the_end_of_a_learned_table():
    cfg = dataclasses.replace(beams.CONFIGS["llama"], position="learned", max_length=6)
    params = tiny.drawn(cfg)
    out = jf.beam_search(params, [[3, 4]], cfg, max_new_tokens=5)  # the last token needs no position any more
    assert np.isfinite(out.scores).all()
    with pytest.raises(ValueError, match="past the learned table of max_length=6"):
        jf.beam_search(params, [[3, 4]], cfg, max_new_tokens=6)
