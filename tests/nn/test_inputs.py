"""Everything wrong at the public edge is refused before any work; positions are counted (rules 5, 11, 13, 21)."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny

import jaxformer as jf
from jaxformer.nn import inputs

pytestmark = pytest.mark.usefixtures("quick_compilation")
LLAMA = dataclasses.replace(tiny.PRESETS["llama_gqa"], n_layers=1)
GPT = dataclasses.replace(tiny.PRESETS["gpt2"], n_layers=1)
PAIRS = dataclasses.replace(tiny.PRESETS["transformer_base"], n_layers=1, encoder_layers=1)
T = [[5, 6, 7], [8, 9, 10]]
SOURCE = {"source": np.array([[3, 4], [5, 6]])}

params_of = functools.cache(tiny.drawn)
forward = jax.jit(jf.forward, static_argnums=2)


def array(values, dtype):
    return np.array(values, dtype)


def as_batch(tokens, given):
    shape = np.shape(tokens)
    return {"tokens": tokens, "targets": np.ones(shape, int), "weights": np.ones(shape, np.float32)} | given


ENTRIES = {
    "forward": lambda cfg, tokens, given: jf.forward(params_of(cfg), tokens, cfg, **given),
    "hidden": lambda cfg, tokens, given: jf.hidden(params_of(cfg), tokens, cfg, **given),
    "loss": lambda cfg, tokens, given: jf.loss(params_of(cfg), as_batch(tokens, given), cfg),
}

WRONG = [
    (LLAMA, [[5, 67]], {}, r"tokens\[0, 1\] = 67 is outside the vocabulary of 67"),
    (LLAMA, [[5, 6], [-1, 7]], {}, r"tokens\[1, 0\] = -1 is outside the vocabulary of 67"),
    (LLAMA, array([[2**32 + 5]], np.int64), {}, "4294967301 is outside the vocabulary"),  # 5 in 32 bits
    (LLAMA, array([[2**40]], np.uint64), {}, "1099511627776 is outside the vocabulary"),
    (LLAMA, [[2**40]], {}, "1099511627776 is outside the vocabulary"),
    (LLAMA, [[5.0, 6.0]], {}, "tokens must be integers, not float64"),
    (LLAMA, [[True, False]], {}, "tokens must be integers, not bool"),
    (LLAMA, [5, 6], {}, r"tokens must have the shape \[batch, length\], not \(2,\)"),
    (LLAMA, [[[5, 6]]], {}, r"tokens must have the shape \[batch, length\], not \(1, 1, 2\)"),
    (LLAMA, T, {"positions": [0, 1, 2]}, r"positions has shape \(3,\), but tokens have \(2, 3\)"),
    (LLAMA, T, {"positions": [[0, 1]]}, r"positions has shape \(1, 2\), but tokens have \(2, 3\)"),
    (LLAMA, T, {"positions": [[0, 1, 2]] * 3}, r"positions has shape \(3, 3\), but tokens have \(2, 3\)"),
    (LLAMA, T, {"positions": [[0.0, 1.0, 2.0]]}, "positions must be integers"),
    (LLAMA, T, {"positions": [[0, -1, 2]]}, r"positions\[0, 1\] = -1"),
    (LLAMA, T, {"segments": [[1, 1]]}, r"segments has shape \(1, 2\), but tokens have \(2, 3\)"),
    (LLAMA, T, {"segments": [[1.0, 1.0, 2.0]]}, "segments must be integers"),
    (LLAMA, T, {"valid": [[True, False]]}, r"valid has shape \(1, 2\), but tokens have \(2, 3\)"),
    (LLAMA, T, {"valid": [[1, 1, 0]]}, "valid must be boolean.*not int32"),
    (GPT, T, {"positions": [[0, 23, 24]]}, r"positions\[0, 2\] = 24 is outside the learned table of max_length=24"),
    (GPT, [[1] * 25], {}, "length 25 goes past the learned table of max_length=24"),
    (LLAMA, T, SOURCE, "source was given, but the model has no encoder"),
    (LLAMA, T, {"source_valid": np.ones((2, 2), bool)}, "source.*was given, but the model has no encoder"),
    (PAIRS, T, {}, "source"),
    (PAIRS, T, {"source": [3, 4]}, r"source must have the shape \[batch, length\], not \(2,\)"),
    (PAIRS, T, {"source": [[3, 4.5], [5, 6]]}, "source must be integers"),
    (PAIRS, T, {"source": [[3, 4], [5, 67]]}, r"source\[1, 1\] = 67 is outside the vocabulary"),
    (PAIRS, T, {"source": [[3, 4]] * 3}, "source"),
    (PAIRS, T, SOURCE | {"source_valid": [[1, 1], [1, 0]]}, "source_valid must be boolean"),
    (PAIRS, T, SOURCE | {"source_valid": np.ones((2, 3), bool)}, r"source_valid has shape \(2, 3\)"),
]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(("cfg", "tokens", "given", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_wrong_inputs_are_refused(entry, cfg, tokens, given, message):
    with pytest.raises(ValueError, match=message):
        ENTRIES[entry](cfg, tokens, given)


ALL_BUT_5 = jf.Sampling(temperature=0.0, banned=tuple(i for i in range(67) if i != 5), min_new_tokens=1)
GENERATION = [
    (LLAMA, [], {}, "prompt"),
    (LLAMA, [[5], []], {}, "prompt 1 is empty"),
    (LLAMA, [[5, 67]], {}, r"prompts\[0, 1\] = 67 is outside"),
    (LLAMA, [[-1]], {}, r"prompts\[0, 0\] = -1 is outside"),
    (LLAMA, [[2**40]], {}, "1099511627776 is outside the vocabulary"),
    (LLAMA, [[5.5, 6.5]], {}, "prompts must be integers"),
    (LLAMA, "hello", {}, r"prompts must be token ids, not text; encode each: prompts=\[tok.encode\(text\)\]"),
    (LLAMA, ["hello", "you"], {}, "prompts must be token ids, not text"),
    (LLAMA, np.array([[5.5, 6.5]]), {}, "prompts must be integers"),
    (LLAMA, [5, 6], {}, "prompts"),
    (LLAMA, np.array([5, 6]), {}, r"prompts must have the shape \[batch, length\]"),
    (LLAMA, np.array(T), {"valid": np.ones((2, 2), bool)}, "valid must be boolean with the prompts' shape"),
    (LLAMA, np.array(T), {"valid": np.ones((2, 3), int)}, "valid must be boolean"),
    (LLAMA, np.array(T), {"valid": np.array([[True] * 3, [False] * 3])}, "prompt 1 has no valid token"),
    (LLAMA, T, {"max_new_tokens": 0}, "max_new_tokens=0 must be an integer of at least 1"),
    (LLAMA, T, {"max_new_tokens": 1.5}, "max_new_tokens=1.5 must be an integer"),
    (LLAMA, T, {"max_new_tokens": True}, "max_new_tokens=True must be an integer"),
    (LLAMA, T, {"num_return": 0}, "num_return=0 must be an integer of at least 1"),
    (LLAMA, T, {"num_return": 2.0}, "num_return=2.0 must be an integer"),
    (LLAMA, T, {"prefill_chunk": 0}, "prefill_chunk=0 must be an integer of at least 1"),
    (LLAMA, T, {"prefill_chunk": None}, "prefill_chunk=None must be an integer"),
    (LLAMA, T, {"top_logprobs": -1}, "top_logprobs=-1 must be"),
    (LLAMA, T, {"top_logprobs": 68}, "top_logprobs=68 must be between 0 and the vocabulary's 67"),
    (LLAMA, T, {"top_logprobs": 1.5}, "top_logprobs=1.5 must be"),
    (LLAMA, T, {"top_logprobs": None}, "top_logprobs=None must be"),
    (LLAMA, T, {"cache_dtype": "float33"}, "float33"),
    (LLAMA, T, {"cache_dtype": "int8"}, "int8"),
    (LLAMA, T, {"eos": (67,)}, "eos id 67 is outside the vocabulary of 67"),
    (LLAMA, T, {"eos": -1}, "eos id -1 is outside the vocabulary of 67"),
    (LLAMA, T, {"eos": (2.5,)}, "eos"),
    (LLAMA, T, {"eos": True}, "eos"),
    (LLAMA, T, {"pad": -1}, "pad id -1 is outside the vocabulary of 67"),
    (LLAMA, T, {"pad": 1.5}, "pad"),
    (LLAMA, T, {"pad": None}, "pad"),
    (LLAMA, T, {"sampling": jf.Sampling(temperature=1.0)}, "sampling needs key="),
    (LLAMA, T, {"sampling": [jf.Sampling(temperature=0.0)] * 3}, "a list of 2, one per row"),
    (LLAMA, T, {"sampling": None}, "sampling must be a Sampling"),
    (LLAMA, T, {"sampling": jf.Sampling(banned=(67,)), "key": 0}, "banned id 67 is outside the vocabulary of 67"),
    (LLAMA, T, {"sampling": jf.Sampling(), "key": 0}, "key"),
    (LLAMA, T, {"sampling": ALL_BUT_5, "eos": 5}, "banned"),  # nothing is left that the first token might be
    (LLAMA, None, {}, "prompts may be None only for an encoder–decoder"),
    (LLAMA, T, SOURCE, "source was given, but the model has no encoder"),
    (LLAMA, T, {"source_valid": np.ones((2, 2), bool)}, "source"),
    (GPT, [[5] * 24], {"max_new_tokens": 2}, "max_length=24"),
    (PAIRS, T, {}, "needs source="),
    (PAIRS, None, {}, "source="),
    (PAIRS, T, {"source": [[3, 4]] * 3}, "source"),
    (PAIRS, None, {"source": [[3, 67]]}, r"source\[0, 1\] = 67"),
    (PAIRS, None, {"source": [[3, 4]], "source_valid": np.ones((1, 3), bool)}, "source_valid has shape"),
    (dataclasses.replace(PAIRS, start_token=None), None, SOURCE, "start_token"),
]


@pytest.mark.parametrize(("cfg", "prompts", "given", "message"), GENERATION, ids=[message for *_, message in GENERATION])
def test_wrong_inputs_of_generate_are_refused(cfg, prompts, given, message):
    with pytest.raises(ValueError, match=message):
        jf.generate(params_of(cfg), prompts, cfg, **({"max_new_tokens": 1} | given))


@pytest.mark.parametrize("name", ["prompts", "valid"])
def test_generation_inside_jit_is_refused(name):
    given = {"prompts": np.array(T), "valid": np.ones((2, 3), bool)}

    def run(traced):
        now = given | {name: traced}
        return jf.generate(params_of(LLAMA), now["prompts"], LLAMA, max_new_tokens=1, valid=now["valid"]).tokens

    with pytest.raises(ValueError, match="inside jit, use jf.decode.generate_arrays"):
        jax.jit(run)(given[name])


@pytest.mark.parametrize("eos", [5, (5,), [5], np.int64(5), np.array([5, 6]), jax.numpy.array(5)], ids=repr)
def test_ends_may_be_any_integers(eos):
    likely = jf.Sampling(temperature=0.0, logit_bias=((5, 1e4),), min_new_tokens=1)
    out = jf.generate(params_of(LLAMA), T, LLAMA, max_new_tokens=3, eos=eos, sampling=likely)
    assert out.lengths.tolist() == [2, 2] and out.tokens[:, 1].tolist() == [5, 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "unknown entry 'extra'"),
        ({"weight": 1}, "unknown entry 'weight'; did you mean 'weights'"),
        ({"targets": None}, "batch lacks targets"),
        ({"targets": [[1, 2]]}, r"'targets' has shape \(1, 2\), but tokens have \(2, 3\)"),
        ({"targets": [[1.0] * 3] * 2}, "'targets' must be integers"),
        ({"targets": [[1, 2, 3], [4, 67, 5]]}, r"targets\[1, 1\] = 67 is outside the vocabulary of 67"),
        ({"targets": [[1, 2, 3], [4, -1, 5]]}, r"targets\[1, 1\] = -1 is outside"),
    ],
)
def test_wrong_batches_are_refused(change, message):
    batch = {name: value for name, value in (as_batch(T, {}) | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        jf.loss(params_of(LLAMA), batch, LLAMA)


def test_parameters_of_another_config_are_refused_with_a_diff():
    other = dataclasses.replace(LLAMA, d_ff=40, qkv_bias=True, tied_head=True)
    expected = [
        r"missing     decoder\.layers\.attention\.query_bias  \[1, 2, 2, 8\]",
        r"unexpected  head\.kernel  \[32, 67\]",
        r"differs     decoder\.layers\.mlp\.down  expected \[1, 40, 32\], found \[1, 48, 32\]",
    ]
    for use in (jf.forward, jf.hidden, lambda p, t, cfg: jf.generate(p, t, cfg, max_new_tokens=1)):
        with pytest.raises(ValueError, match="parameters do not fit the config") as raised:
            use(params_of(LLAMA), T, other)
        for line in expected:
            raised.match(line)


@pytest.mark.parametrize("layers", [1, 3])
def test_parameters_of_another_depth_are_refused_with_a_diff(layers):
    cfg = dataclasses.replace(LLAMA, n_layers=2)
    for use in (jf.forward, lambda p, t, cfg: jf.generate(p, t, cfg, max_new_tokens=1)):
        with pytest.raises(ValueError, match=rf"differs     decoder\.layers\.mlp\.down  expected \[2, .*found \[{layers}, "):
            use(params_of(dataclasses.replace(LLAMA, n_layers=layers)), T, cfg)


@pytest.mark.parametrize("params", [None, [[1, 2]], np.ones((2, 3))])
def test_parameters_that_are_no_dict_are_refused(params):
    with pytest.raises(ValueError, match="parameters"):
        jf.forward(params, T, LLAMA)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int64, np.uint32])
def test_every_integer_dtype_gives_the_same(dtype):
    cfg = dataclasses.replace(LLAMA, vocab_size=300)  # more rows than 8 bits count
    tokens = np.array([[5, 120, 7]])
    expected = forward(params_of(cfg), tokens, cfg)
    np.testing.assert_array_equal(forward(params_of(cfg), tokens.astype(dtype), cfg), expected)


# Inside jit values are not known


@pytest.mark.parametrize("wrong", [-1, -67, -68, 67, 1000])
def test_a_traced_id_outside_the_vocabulary_gives_nan(wrong):
    out = np.asarray(forward(params_of(LLAMA), np.array([[5, wrong, 6], [5, 6, 7]]), LLAMA))
    assert np.isnan(out[0, 1:]).all() and np.isfinite(out[1]).all()


def test_the_last_row_of_a_learned_table_works_and_a_traced_position_outside_gives_nan():
    run = jax.jit(lambda positions: jf.forward(params_of(GPT), [[5, 6], [5, 6]], GPT, positions=positions))
    last, before = (np.asarray(run(np.array([[0, at], [0, 1]]))) for at in (23, 22))
    assert np.isfinite(last).all() and np.abs(last - before)[0, 1].max() > 1e-3
    for wrong in (24, -1, 1000):
        out = np.asarray(run(np.array([[0, wrong], [0, 1]])))
        assert np.isnan(out[0, 1]).all() and np.isfinite(out[1]).all()


# Positions that are not given


def count_by_hand(segments, valid):
    """Among the valid tokens of its own segment, how many stand before each."""
    positions = np.zeros(valid.shape, int)
    for row in range(len(valid)):
        for at in range(valid.shape[1]):
            positions[row, at] = sum(valid[row, i] and segments[row, i] == segments[row, at] for i in range(at))
    return positions


ONE = np.ones((2, 6), int)
ALL = np.ones((2, 6), bool)
LEFT = np.array([[False, False, True, True, True, True], [True] * 6])
PACKED = np.array([[1, 1, 1, 2, 2, 3], [7, 7, 4, 4, 4, 4]])
LAYOUTS = {
    "right padding": (None, LEFT[:, ::-1]),
    "left padding": (None, LEFT),
    "packed": (PACKED, None),
    "packed, padding at the end": (PACKED, np.array([[True] * 5 + [False], [True] * 4 + [False] * 2])),
    "packed, padding within": (PACKED, np.array([[True, True, False, True, False, True], [False, True] * 3])),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_positions_count_the_valid_tokens_of_each_segment(name):
    segments, valid = LAYOUTS[name]
    counted = ALL if valid is None else valid
    expected = count_by_hand(ONE if segments is None else segments, counted)
    assert not np.array_equal(expected, np.tile(np.arange(6), (2, 1)))
    info = inputs.token_info("", (2, 6), LLAMA, segments=segments, valid=valid)
    found = np.broadcast_to(info.position, (2, 6))
    np.testing.assert_array_equal(found[counted], expected[counted])
    given = {"segments": segments, "valid": valid}
    tokens = tiny.tokens(GPT, 2, 6)
    counted_logits = np.asarray(forward(params_of(GPT), tokens, GPT, **given))
    given_logits = np.asarray(forward(params_of(GPT), tokens, GPT, positions=np.where(counted, expected, 0), **given))
    np.testing.assert_array_equal(counted_logits[counted], given_logits[counted])
    other = np.asarray(forward(params_of(GPT), tokens, GPT, positions=np.arange(6)[None, ::-1], **given))
    assert np.abs(other - counted_logits)[counted].max() > 1e-2, "positions matter"


def test_segments_are_not_narrowed_into_one():
    segments = np.array([[0, 0, 2**32, 2**32]])  # 0 in 32 bits
    with pytest.raises(ValueError, match=r"segments\[0, 2\] = 4294967296 is outside the range of 32 bits"):
        jf.forward(params_of(LLAMA), np.array([[3, 4, 5, 6]]), LLAMA, segments=segments)
