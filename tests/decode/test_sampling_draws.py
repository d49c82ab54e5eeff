"""Frequencies of 100,000 draws against the exact distribution of each method, by Pearson's chi-square test, keys fixed."""

import functools
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling_by_hand as by_hand

import jaxformer as jf
from jaxformer.decode import choose, sampling

V, DRAWS, LEVEL = 16, 100_000, 1e-6
LOGITS = (1.2 * np.random.default_rng(0).standard_normal(V)).astype(np.float32)
PROMPT, GENERATED, EOS = [1, 4, 4, 9], [3, 4, 4, 11], (int(LOGITS.argmax()), 6)


def sharpen(logits):
    return logits * 1.5


METHODS = {
    "temperature 0.5": {"temperature": 0.5},
    "temperature 2": {"temperature": 2.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "typical_p": {"typical_p": 0.7},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "presence_penalty": {"presence_penalty": 0.8},
    "frequency_penalty": {"frequency_penalty": 0.6},
    "logit_bias": {"logit_bias": ((2, 1.0), (7, -1.5))},
    "banned": {"banned": (0, 5)},
    "min_new_tokens": {"min_new_tokens": 5},
    "transform": {"transform": sharpen},
}
EVERYTHING = functools.reduce(dict.__or__, METHODS.values()) | {"temperature": 2.0, "top_k": 9, "top_p": 0.95, "typical_p": 0.6}
# min-p and top-p both cut the tail: where one cuts more, leaving out the other changes nothing
METHODS["all but min_p"] = {name: value for name, value in EVERYTHING.items() if name != "min_p"}
OTHERS = EVERYTHING | {"temperature": 3.0, "typical_p": 0.7, "repetition_penalty": 1.3}
METHODS["all but top_k and top_p"] = {name: value for name, value in OTHERS.items() if name not in ("top_k", "top_p")}


def exact(fields):
    p, margin = by_hand.distribution(LOGITS, jf.Sampling(**fields), PROMPT, GENERATED, EOS)
    assert margin > 1e-4, "the distribution is the same in float32"
    return p


def statistic(counts, p):
    """Pearson's, infinite where something was drawn that has no probability."""
    if counts[p == 0].any():
        return np.inf
    expected = counts.sum() * p[p > 0]
    assert expected.min() > 5, "below, the statistic follows no chi-square distribution"
    return ((counts[p > 0] - expected) ** 2 / expected).sum()


def critical(degrees, level=LEVEL):
    """What a chi-square variable exceeds with probability ``level``, after Wilson & Hilferty 1931: its cube root is normal."""
    share = 2 / (9 * degrees)
    return degrees * (1 - share + NormalDist().inv_cdf(1 - level) * share**0.5) ** 3


def rejected(counts, p):
    return statistic(counts, p) > critical(max((p > 0).sum() - 1, 1))


def test_the_critical_value_is_that_of_the_tables():
    # 5% and 0.1% for 10 degrees of freedom: 18.307 and 29.588; the formula is good to 1% there
    np.testing.assert_allclose([critical(10, 0.05), critical(10, 0.001)], [18.307, 29.588], rtol=1e-2)


@functools.cache
def counts():
    """Of the draws of all methods, one a row, in one call: [methods, V]."""
    each = [jf.Sampling(**fields) for fields in METHODS.values()]
    methods, values = sampling.compile_sampling(each, len(each), V)
    row = lambda x: np.tile(x, (len(each), 1))
    seen = choose.History(row(np.isin(np.arange(V), PROMPT)), row(np.bincount(GENERATED, minlength=V)))

    @jax.jit
    def draw(values, seen):
        new = jnp.full(len(each), len(GENERATED))
        shaped = choose.shape(jnp.asarray(row(LOGITS)), methods, values, seen, new, EOS)
        keys = jax.random.split(jax.random.key(0), (len(each), DRAWS))

        def count(shaped, keys):
            drawn = choose.choose(jnp.broadcast_to(shaped, (DRAWS, V)), methods, keys)
            return (drawn[:, None] == jnp.arange(V)).sum(0)

        return jax.lax.map(lambda x: count(*x), (shaped, keys))

    return dict(zip(METHODS, np.asarray(draw(values, seen)), strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_draws_follow_the_exact_distribution(name):
    found, p = counts()[name], exact(METHODS[name])
    assert found.sum() == DRAWS
    for left_out in METHODS[name]:
        wrong = exact({field: value for field, value in METHODS[name].items() if field != left_out})
        assert rejected(found, wrong), f"without {left_out}, the distribution would be another"
    assert not rejected(found, p), f"{statistic(found, p)} of {critical((p > 0).sum() - 1)}"


def test_a_draw_is_the_keys_alone():
    """The same keys draw the same, whatever rows stand beside; other keys draw otherwise."""
    methods, _ = sampling.compile_sampling(jf.Sampling(), 1, V)
    keys = jax.random.split(jax.random.key(1), 64)
    draw = jax.jit(lambda logits, keys: choose.choose(logits, methods, keys))
    logits = np.tile(LOGITS, (64, 1))
    first, turned = draw(logits, keys), draw(logits, keys[::-1])
    np.testing.assert_array_equal(turned[::-1], first)
    assert len(np.unique(first)) > 4 and (np.asarray(turned) != first).mean() > 0.5
