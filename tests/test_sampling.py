"""Sampling: temperature, top-k, top-p (rule 17)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.decode.generate import sample, truncate

P = np.array([0.5, 0.3, 0.15, 0.05])


def kept(logits, **sampling):
    found = truncate(jnp.array([logits], jnp.float32), jf.Sampling(**sampling))[0]
    np.testing.assert_array_equal(found[found > -np.inf], np.array(logits, np.float32)[found > -np.inf])
    return np.flatnonzero(found > -np.inf).tolist()


@pytest.mark.parametrize(("p", "count"), [(0.6, 2), (0.5, 1), (0.0, 1), (1.0, 4), (0.81, 3), (0.96, 4)])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_top_p_keeps_a_token_iff_the_mass_before_it_is_below_p(p, count, order):
    probable = [order.index(rank) for rank in range(count)]
    assert kept(np.log(P[order]), top_p=p) == sorted(probable)


@pytest.mark.parametrize(("k", "ids"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (4, [1, 2, 3, 4]), (5, [0, 1, 2, 3, 4])])
def test_top_k_keeps_exactly_k_lowest_id_first(k, ids):
    assert kept([1, 3, 3, 2, 3], top_k=k) == ids


def test_top_k_of_more_than_the_vocabulary_and_of_equals():
    assert kept([1, 3, 3, 2, 3], top_k=9) == kept([1, 3, 3, 2, 3]) == [0, 1, 2, 3, 4]
    assert kept([2, 2, 2, 2], top_k=3) == [0, 1, 2]
    assert kept([2, 2, 2, 2], top_p=0.5) == [0, 1]


def test_top_p_goes_by_what_top_k_has_left():
    assert kept(np.log(P), top_p=0.6) == [0, 1]
    assert kept(np.log(P), top_k=2, top_p=0.6) == [0]  # 0.5 of 0.8 is 0.625


def test_temperature_comes_before_top_p():
    logits = jnp.log(jnp.array([P], jnp.float32))
    ids = {float(t): {int(i) for i in draws(logits, temperature=t, top_p=0.6)} for t in (0.5, 1.0, 2.0)}
    # softmax(log P / t): 0.68 at t = 0.5 keeps one; 0.37, 0.29 at t = 2 keep two, 0.5, 0.3 at t = 1 too
    assert ids == {0.5: {0}, 1.0: {0, 1}, 2.0: {0, 1}}


def draws(logits, count=4000, **sampling):
    return sample(jnp.tile(logits, (count, 1)), jf.Sampling(**sampling), jax.random.key(0))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    expected = P ** (1 / temperature) / (P ** (1 / temperature)).sum()
    found = np.bincount(draws(jnp.log(P), temperature=temperature), minlength=4) / 4000
    assert (np.abs(found - expected) <= 5 * np.sqrt(expected * (1 - expected) / 4000)).all()  # five standard deviations


def test_temperature_zero_is_argmax_with_the_lowest_id_among_equals():
    logits = jnp.array([[1.0, 3.0, 3.0, 2.0], [5.0, 1.0, 1.0, 1.0]])
    for seed in range(3):
        np.testing.assert_array_equal(sample(logits, jf.Sampling(temperature=0), jax.random.key(seed)), [1, 0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_p": -0.1}, "top_p=-0.1"),
        ({"topk": 3}, "no field 'topk'; did you mean 'top_k'"),
    ],
)
def test_wrong_sampling_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        jf.Sampling(**fields)
