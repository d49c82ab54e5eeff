"""Methods of sampling against float64 NumPy that sorts, alone and together; what they refuse (rule 17)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling_by_hand as by_hand

import jaxformer as jf
from jaxformer.decode import choose, sampling

P = np.array([0.5, 0.3, 0.15, 0.05])
V = 12
EOS = (2, 7)

leading = jax.jit(choose.leading)
shape = jax.jit(choose.shape, static_argnames=("methods", "eos"))


# The one function that top-k, top-p and typical sampling share


def cases(kind, rows=4000):
    """Scores, weights and limits; weights and limits are 64ths, whose sums are exact in float32, so that limits are met."""
    rng = np.random.default_rng(0)
    scores = {
        "few values": np.array([-np.inf, -3e38, -2, -1e-30, -0.0, 0.0, 1e-30, 0.5, 3e38], np.float32),
        "floats of all sizes": (rng.standard_normal(500) * 10.0 ** rng.integers(-30, 30, 500)).astype(np.float32),
        "one value": np.array([0.25], np.float32),
    }[kind]
    weight = rng.integers(0, 9, (rows, V)) / 64
    limit = rng.integers(1, 60, (rows, 1)) / 64
    limit[::10] = np.inf
    return rng.choice(scores, (rows, V)), weight.astype(np.float32), limit.astype(np.float32)


@pytest.mark.parametrize("kind", ["few values", "floats of all sizes", "one value"])
def test_leading_is_a_sort(kind):
    score, weight, limit = cases(kind)
    expected = np.array([by_hand.leading(*row) for row in zip(score, weight, limit[:, 0], strict=True)])
    met = (np.cumsum(np.take_along_axis(weight, (-score).argsort(1, stable=True), 1), 1) == limit).any(1)
    assert 0.2 < expected.mean() < 0.9 and met.mean() > 0.1, "some limits are met exactly"
    np.testing.assert_array_equal(leading(score, weight, limit), expected)


def test_both_zeros_are_one_score():
    score = np.array([[-0.0, 0.0, -0.0, 0.0], [0.0, -0.0, 0.0, -0.0]], np.float32)
    found = leading(score, np.ones_like(score), np.full((2, 1), 2, np.float32))
    np.testing.assert_array_equal(found, [[True, True, False, False]] * 2)


# Literal values


def shaped(logits, each, history=None, new=None):
    """What ``shape`` makes of logits [B, V] with one ``Sampling`` a row."""
    logits = np.asarray(logits, np.float32)
    methods, values = sampling.compile_sampling(each, *logits.shape)
    return np.asarray(shape(logits, methods, values, history, np.zeros(len(logits), int) if new is None else new, eos=EOS))


def kept(logits, **fields):
    found = shaped([logits], [jf.Sampling(**fields)])[0]
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
    assert kept([1, 3, 3, 2, 3], top_k=9) == kept([1, 3, 3, 2, 3], top_k=0) == [0, 1, 2, 3, 4]
    assert kept([2, 2, 2, 2], top_k=3) == [0, 1, 2]
    assert kept([2, 2, 2, 2], top_p=0.5) == [0, 1]


def test_each_method_goes_by_what_those_before_have_left():
    assert kept(np.log(P), top_p=0.6) == [0, 1]
    assert kept(np.log(P), top_k=2, top_p=0.6) == [0]  # 0.5 of 0.8 is 0.625
    assert kept(np.log(P), min_p=0.35) == [0, 1] and kept(np.log(P), min_p=0.1) == [0, 1, 2, 3]
    # the entropy is 1.142, informations are 0.693, 1.204, 1.897, 2.996: the second token is the most typical, then the first
    assert kept(np.log(P), typical_p=0.2) == [1] and kept(np.log(P), typical_p=0.5) == [0, 1]


# Every method against the papers' definitions


def tilt(logits):
    return logits * 0.75 - 0.125 * np.arange(V)


def hide_every_third(logits):
    where = jnp.where if isinstance(logits, jax.Array) else np.where
    return where(np.arange(V) % 3 == 0, -np.inf, logits)


ALONE = {
    "temperature": [0.0, 0.3, 1.0, 2.5],
    "top_k": [0, 1, 4, V - 1, V, V + 3],
    "top_p": [0.0, 0.25, 0.6, 0.93, 1.0],
    "min_p": [0.0, 0.02, 0.3, 1.0],
    "typical_p": [0.0, 0.2, 0.6, 0.95, 1.0],
    "repetition_penalty": [0.5, 1.0, 1.75],
    "presence_penalty": [-1.5, 0.0, 0.75],
    "frequency_penalty": [-0.5, 0.0, 1.25],
    "logit_bias": [((3, 2.5), (0, -40.0)), ((5, 1.5), (5, -0.25)), ()],
    "banned": [(0, 5), tuple(range(V - 1)), ()],
    "min_new_tokens": [0, 1, 3, 9],
    "transform": [tilt, hide_every_third, None],
}


def rows_alone(name):
    return [jf.Sampling(**{name: value}) for value in ALONE[name] for _ in range(30)]


def rows_combined():
    """Each method in half of the rows."""
    rng = np.random.default_rng(1)
    pick = lambda values: values[rng.integers(len(values))]
    return [jf.Sampling(**{n: pick(values) for n, values in ALONE.items() if rng.random() < 0.5}) for _ in range(1000)]


def situations(rows):
    """Logits (some equal), prompts, and what was generated."""
    rng = np.random.default_rng(2)
    logits = 1.5 * rng.standard_normal((rows, V)).astype(np.float32)
    logits[::2] = np.round(2 * logits[::2]) / 2
    some = lambda most: rng.integers(0, V, rng.integers(0, most)).tolist()
    return logits, [some(6) for _ in range(rows)], [some(5) for _ in range(rows)]


def history(prompts, generated):
    seen = [[token in row for token in range(V)] for row in prompts]
    return choose.History(np.array(seen), np.array([[row.count(token) for token in range(V)] for row in generated]))


def compare(each):
    logits, prompts, generated = situations(len(each))
    found = shaped(logits, each, history(prompts, generated), np.array([len(row) for row in generated]))
    rows = [by_hand.distribution(*row, eos=EOS) for row in zip(logits, each, prompts, generated, strict=True)]
    expected = np.array([p for p, _ in rows])
    clear = np.array([margin > 1e-5 for _, margin in rows])  # else float32, of logits below 10, may decide otherwise
    assert clear.mean() > 0.97
    np.testing.assert_array_equal((found > -np.inf)[clear], (expected > 0)[clear])
    # 1e-5 is a rounding of a logit of 200, which the smallest temperature makes of a bias of −40
    np.testing.assert_allclose(jax.nn.softmax(found)[clear], expected[clear], atol=1e-5, rtol=0)
    plain = np.asarray(jax.nn.softmax(logits))
    return np.abs(plain - expected).max(1)


@pytest.mark.parametrize("name", ALONE)
def test_each_method_alone(name):
    each = rows_alone(name)
    methods, _ = sampling.compile_sampling(each, len(each), V)
    own = {"logit_bias": "bias", "banned": "bias"}.get(name, name)
    assert methods.names - {"temperature"} == {own} - {"temperature", "transform"}
    changed = compare(each)
    assert (changed > 0.01).mean() > 0.3, "the method matters"


def test_all_methods_together():
    each = rows_combined()
    methods, _ = sampling.compile_sampling(each, len(each), V)
    assert methods.names == {*sampling.NUMBERS, "bias"} and len(methods.transforms) == 2
    compare(each)


def test_a_greedy_row_keeps_the_lowest_id_among_equals_and_an_all_greedy_batch_takes_it():
    logits = np.array([[1.0, 3.0, 3.0, 2.0], [5.0, 1.0, 1.0, 1.0]], np.float32)
    mixed = shaped(logits, [jf.Sampling(temperature=0, top_k=3), jf.Sampling(top_p=0.99)])
    np.testing.assert_array_equal(mixed[0] > -np.inf, [False, True, False, False])
    methods, _ = sampling.compile_sampling(jf.Sampling(temperature=0, top_k=2, top_p=0.3), 2, 4)
    assert methods.greedy and not methods.names, "what changes no greedy token compiles nothing"
    np.testing.assert_array_equal(choose.choose(logits, methods, None), [1, 0])


def test_the_smallest_temperatures_take_the_most_probable():
    logits = np.array([[5.0, 9.0, 8.999, -1.0]], np.float32)
    for temperature in (5e-6, 1e-30, 2e-38):  # the gap is 1e-3; 9 / 2e-38 is more than float32 holds
        found = jax.nn.softmax(shaped(logits, [jf.Sampling(temperature=temperature)]))
        np.testing.assert_array_equal(found, [[0, 1, 0, 0]])


def test_a_bias_may_be_a_dict():
    assert jf.Sampling(logit_bias={3: 0.5, 4: -1.0}) == jf.Sampling(logit_bias=((3, 0.5), (4, -1.0)))


# What is refused

NAN, INF = float("nan"), float("inf")
WRONG = {
    "temperature": [-0.1, NAN, INF, "hot", None, True],
    "top_k": [-1, 1.5, None, True],
    "top_p": [1.1, -0.1, NAN, "0.5"],
    "min_p": [1.1, -0.1, NAN, None],
    "typical_p": [1.1, -0.1, NAN, None],
    "repetition_penalty": [0.0, 0, -1.0, NAN, INF],
    "presence_penalty": [NAN, INF, "1"],
    "frequency_penalty": [NAN, -INF, None],
    "logit_bias": [((3, NAN),), ((3.5, 1.0),), ((3, 1.0, 2.0),), ((3,),), (3, 1.0), 3, {3: "much"}],
    "banned": [(1.5,), 3, ("a",)],
    "min_new_tokens": [-1, 0.5, None],
    "transform": [3, "tilt"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_wrong_sampling_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        jf.Sampling(**{name: value})


def test_an_unknown_method_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="no field 'topk'; did you mean 'top_k'"):
        jf.Sampling(topk=3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (jf.Sampling(banned=(V,)), f"banned id {V} is outside the vocabulary of {V}"),
        (jf.Sampling(banned=(-1,)), "banned id -1 is outside"),
        (jf.Sampling(logit_bias=((1, 0.0), (V, 1.0))), f"logit_bias id {V} is outside the vocabulary of {V}"),
        (jf.Sampling(logit_bias=((-1, 1.0),)), "logit_bias id -1 is outside"),
        (jf.Sampling(banned=tuple(range(V))), "every token is banned"),
        ([jf.Sampling()], "sampling must be a Sampling, or a list of 2"),
        ([jf.Sampling()] * 3, "sampling must be a Sampling, or a list of 2"),
        ([], "sampling must be a Sampling, or a list of 2"),
        ([jf.Sampling(), 0.5], "sampling must be a Sampling, or a list of 2"),
        ("greedy", "sampling must be a Sampling, or a list of 2"),
        (None, "sampling must be a Sampling, or a list of 2"),
        (0.7, "sampling must be a Sampling, or a list of 2"),
    ],
)
def test_wrong_samplings_of_rows_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        sampling.compile_sampling(given, 2, V)


@pytest.mark.parametrize("transform", [lambda x: x[:, :-1], lambda x: x[0], lambda x: None], ids=["narrower", "row", "None"])
def test_a_transform_of_another_shape_is_refused(transform):
    with pytest.raises(ValueError, match="transform must return an array like its logits"):
        shaped(np.zeros((2, V)), jf.Sampling(temperature=0, transform=transform))


def test_every_field_is_covered_here():
    fields = {field.name for field in dataclasses.fields(jf.Sampling)}
    assert fields == set(ALONE) == set(WRONG)
