"""The cache itself: what it declares and takes, its end, going back, rows that change places (rules 3, 11, 12)."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny
from decoding import close, forward, inputs, model

import jaxformer as jf
from jaxformer.config.components import Component
from jaxformer.nn import cache_spec
from jaxformer.nn.cache import SOURCE

pytestmark = pytest.mark.usefixtures("quick_compilation")


def of(name, **fields):
    return dataclasses.replace(tiny.PRESETS[name], **fields)


def shallow(name):
    """A preset with one layer of each kind, and parameters."""
    return model(name, layers=2 if name == "mixed_windows" else 1)


# What it declares


def test_the_spec_gives_letters_shapes_and_dtypes():
    cfg = of("mixed_windows", dtype="bfloat16")  # windows of 4, all, 4
    spec = cache_spec.spec(cfg, batch=2, max_len=10, ahead=3)
    assert [sorted(layer) for layer in spec.layers] == [["key", "value"]] * 3
    for layer, slots in zip(spec.layers, (7, 10, 7), strict=True):
        for param in layer.values():
            assert (param.dims, param.shape(cfg), param.dtype) == ("BKSH", (2, 4, slots, 8), "bfloat16")
    assert (spec.used.dims, spec.used.shape(cfg), spec.used.dtype, spec.length) == ("B", (2,), "int32", 10)
    assert not any(param.decay for param in jax.tree.leaves(spec, is_leaf=lambda leaf: isinstance(leaf, jf.Param)))
    kept = jf.init_cache(cfg, 2, 10, dtype="float32", ahead=3)
    assert jax.tree.map(np.shape, kept) == jax.tree.map(np.shape, jf.spec.abstract(spec, cfg))
    assert kept.layers[0]["key"].dtype == np.float32 and not any(leaf.any() for leaf in jax.tree.leaves(kept))


def test_dtype_is_the_compute_dtype_unless_given():
    cfg = of("llama_gqa", dtype="bfloat16", param_dtype="float32")
    assert jf.init_cache(cfg, 1, 4).layers[0]["key"].dtype == "bfloat16"
    assert jf.init_cache(of("llama_gqa", param_dtype="bfloat16"), 1, 4).layers[0]["key"].dtype == np.float32


def bytes_of(cfg, *args, **given):
    return cache_spec.size(jf.spec.abstract(cache_spec.spec(cfg, *args, **given), cfg))


def test_a_window_keeps_as_much_as_it_needs_however_long_the_context():
    cfg = jf.presets.mistral_7b(dtype="bfloat16")  # 32 layers of 8 heads of 128, windows of 4,096
    token = 32 * 2 * 8 * 128 * 2
    assert (
        bytes_of(cfg, 3, 1_000_000) == bytes_of(cfg, 3, 4097) == 3 * (4096 * token + 8)
    )  # 8: how many tokens so far, and at most
    assert bytes_of(cfg, 1, 1_000_000, ahead=5) == 4101 * token + 8
    assert bytes_of(cfg, 1, 1000) == 1000 * token + 8
    assert bytes_of(dataclasses.replace(cfg, window=None), 1, 1_000_000) == 1_000_000 * token + 8
    mixed = dataclasses.replace(cfg, window=(4096,) * 31 + (None,))
    assert bytes_of(mixed, 1, 1_000_000) == (31 * 4096 + 1_000_000) * token // 32 + 8


# What it refuses

WRONG = [
    ({"batch": 0}, "batch=0 must be an integer of at least 1"),
    ({"batch": 1.5}, "batch=1.5 must be an integer"),
    ({"batch": True}, "batch=True must be an integer"),
    ({"max_len": 0}, "max_len=0 must be an integer of at least 1"),
    ({"max_len": None}, "max_len=None must be an integer"),
    ({"ahead": -1}, "ahead=-1"),
    ({"ahead": 0.5}, "ahead=0.5"),
    ({"ahead": True}, "ahead=True"),
    ({"dtype": "float33"}, "float33"),
    ({"dtype": "int8"}, "int8"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arguments_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        jf.init_cache(of("mistral"), **({"batch": 1, "max_len": 8} | given))


def test_a_learned_table_bounds_the_cache():
    cfg, params = shallow("gpt2")
    jf.init_cache(cfg, 1, 24)
    with pytest.raises(ValueError, match="cache length 25 goes past the learned table of max_length=24"):
        jf.init_cache(cfg, 1, 25)
    with pytest.raises(ValueError, match=r"positions\[0, 1\] = 24 is outside the learned table of max_length=24"):
        jf.forward_cached(params, [[5, 6]], cfg, jf.init_cache(cfg, 1, 2), positions=[[23, 24]])


def test_models_that_cannot_decode_are_refused():
    with pytest.raises(ValueError, match="a cache needs causal attention"):
        jf.init_cache(of("llama_gqa", causal=False), 1, 8)
    with pytest.raises(ValueError, match="needs cache"):
        jf.init_cache(of("llama_gqa", attention=Component(lambda cfg: {}, lambda params, x, cfg: x)), 1, 8)


class OtherEntries:
    """Attention that keeps something else than it says."""

    spec, cache = staticmethod(jf.attention.grouped_spec), staticmethod(jf.attention.grouped_cache)

    @staticmethod
    def apply(params, x_BTD, cfg, *, cache=None, **where):
        _, _, cache = cache.extend({"keys": x_BTD})
        return jf.attention.grouped_apply(params, x_BTD, cfg, **where)[0], cache


def test_wrong_chunks_are_refused():
    cfg, params = shallow("llama_gqa")
    cache = jf.init_cache(cfg, 2, 8)
    with pytest.raises(ValueError, match="tokens have 1 rows, but the cache has 2"):
        jf.forward_cached(params, [[5]], cfg, cache)
    with pytest.raises(ValueError, match="segments cannot be combined with a cache"):
        jf.apply(params, [[5], [6]], cfg, cache=cache, segments=[[1], [1]])
    with pytest.raises(ValueError, match="valid must be boolean"):
        jf.forward_cached(params, [[5], [6]], cfg, cache, valid=[[1], [0]])
    with pytest.raises(ValueError, match=r"valid has shape \(2, 2\), but tokens have \(2, 1\)"):
        jf.forward_cached(params, [[5], [6]], cfg, cache, valid=np.ones((2, 2), bool))
    other = dataclasses.replace(cfg, attention=OtherEntries)
    with pytest.raises(ValueError, match=r"keeps \['keys'\]; its cache has \['key', 'value'\]"):
        jf.forward_cached(params, [[5], [6]], other, jf.init_cache(other, 2, 8))
    pairs, pair_params = shallow("transformer_base")
    with pytest.raises(ValueError, match="the first chunk of an encoder–decoder needs source="):
        jf.forward_cached(pair_params, [[5]], pairs, jf.init_cache(pairs, 1, 8))


# Its end (rule 12)


def feed(name, cache, tokens, **given):
    cfg, params = shallow(name)
    return tiny.forward_cached(params, tokens, cfg, cache, **given)


@pytest.mark.parametrize("name", ["llama_gqa", "gpt2", "mistral"])
def test_exactly_full_works_and_one_more_raises(name):
    cfg, params = shallow(name)
    tokens = tiny.tokens(cfg, 1, 8)
    _, six = feed(name, jf.init_cache(cfg, 1, 8), tokens[:, :6])
    with pytest.raises(ValueError, match="3 tokens do not fit: 6 of the cache's 8 slots are used"):
        jf.forward_cached(params, tokens[:, :3], cfg, six)
    logits, full = feed(name, six, tokens[:, 6:])
    close(logits, np.asarray(forward(params, tokens, cfg))[:, 6:])
    with pytest.raises(ValueError, match="1 tokens do not fit: 8 of the cache's 8 slots are used"):
        jf.forward_cached(params, tokens[:, :1], cfg, full)


def uneven(name, fed=(6, 8)):
    """A cache of 8 slots of which the two rows have used so many."""
    cfg, _ = shallow(name)
    tokens = tiny.tokens(cfg, 2, 8)
    return tokens, feed(name, jf.init_cache(cfg, 2, 8), tokens, valid=np.arange(8) < np.array(fed)[:, None])[1]


@pytest.mark.parametrize("name", ["llama_gqa", "gpt2", "mistral"])
def test_each_row_has_an_end_of_its_own(name):
    cfg, params = shallow(name)
    tokens, cache = uneven(name)
    assert cache.used.tolist() == [6, 8]
    with pytest.raises(ValueError, match=r"1 tokens do not fit: 8 of the cache's 8 slots are used \(row 1\)"):
        jf.forward_cached(params, tokens[:, :2], cfg, cache, valid=np.array([[True, True], [True, False]]))
    only_first = np.array([[True, True], [False, False]])
    jf.Cache.advance(cache, (2, 2), cfg, None, only_first)  # does not raise
    logits, after = feed(name, cache, tokens[:, 6:], valid=only_first)
    assert after.used.tolist() == [8, 8] and np.isfinite(logits).all()
    close(logits[:1], np.asarray(forward(params, tokens, cfg))[:1, 6:])


@pytest.mark.parametrize("name", ["llama_gqa", "gpt2", "mistral"])
def test_traced_tokens_past_the_end_give_nan_in_their_row_only(name):
    cfg, params = shallow(name)
    tokens, cache = uneven(name)
    logits, after = feed(name, cache, tokens[:, 6:])
    assert np.isnan(logits[1]).all() and after.used.tolist() == [8, 10]
    close(logits[:1], np.asarray(forward(params, tokens, cfg))[:1, 6:])
    for _ in range(2):
        logits, after = feed(name, after, tokens[:, :1], valid=np.array([[False], [True]]))
        assert np.isfinite(logits[0]).all() and np.isnan(logits[1]).all()
    with pytest.raises(ValueError, match="9 tokens do not fit: the cache has 8 slots"):  # known while tracing
        feed(name, cache, tiny.tokens(cfg, 2, 9))


# Going back


@pytest.mark.parametrize(("name", "ahead"), [("llama_gqa", 0), ("gpt2", 0), ("mistral", 3), ("mixed_windows", 3)])
def test_what_is_taken_back_has_never_been(name, ahead):
    """Rows go back by 3, 0 and 1 tokens, in rings too, then on with other tokens."""
    cfg, _ = shallow(name)
    tokens, others = tiny.tokens(cfg, 3, 14), tiny.tokens(cfg, 3, 14, seed=1)
    back, used = np.array([3, 0, 1]), np.array([9, 9, 9])
    start = jf.init_cache(cfg, 3, 16, ahead=ahead)
    assert ahead == 0 or start.layers[0]["key"].shape[2] == 4 + 3, "it is a ring"
    for at in (0, 3, 6):
        _, start = feed(name, start, tokens[:, at : at + 3])
    never = jf.init_cache(cfg, 3, 16, ahead=ahead)
    for at in (0, 3, 6):
        _, never = feed(name, never, tokens[:, at : at + 3], valid=np.arange(at, at + 3) < (used - back)[:, None])
    again, kept_on = start.rewind(used - back), start
    for at, width in ((9, 3), (12, 1), (13, 1)):
        chunk = others[:, at : at + width]
        found, again = feed(name, again, chunk)
        expected, never = feed(name, never, chunk)
        plain, kept_on = feed(name, kept_on, chunk)
        close(found, expected)
        assert again.used.tolist() == never.used.tolist()
        if at == 9:  # windows pass over them later
            assert np.abs(found - plain)[[0, 2]].max(axis=(1, 2)).min() > 0.1, "the tokens that were taken back would matter"


# Rows that change places


@pytest.mark.parametrize("name", ["llama_gqa", "mixed_windows", "transformer_base"])
def test_taken_rows_go_on_as_themselves(name):
    cfg, _ = shallow(name)
    given, rows = inputs(cfg), np.array([1, 1, 0])
    valid = np.array([[True] * 3 + [False] * 3, [True] * 6])
    _, cache = feed(name, jf.init_cache(cfg, 2, 9), tiny.tokens(cfg, 2, 6), valid=valid, **given)
    next_ = tiny.tokens(cfg, 2, 2, seed=1)
    expected, _ = feed(name, cache, next_)
    found, after = feed(name, jax.jit(jf.Cache.take)(cache, rows), next_[rows])
    assert np.abs(expected[0] - expected[1]).max() > 0.1, "rows differ"
    close(found, np.asarray(expected)[rows])
    assert after.used.tolist() == [8, 8, 5]


def test_the_source_may_stay_where_it_is():
    """For rows that share a source: nothing of it is moved."""
    cfg, _ = shallow("transformer_base")
    given = {key: value[[1, 1]] for key, value in inputs(cfg).items()}
    _, cache = feed("transformer_base", jf.init_cache(cfg, 2, 9), tiny.tokens(cfg, 2, 6), **given)
    taken = jf.Cache.take(cache, np.array([1, 0]), source=False)
    for layer, before in zip(taken.layers, cache.layers, strict=True):
        assert layer.keys() == before.keys() > {*SOURCE, "key"}
        assert all(layer[name] is before[name] for name in SOURCE)
        np.testing.assert_array_equal(layer["key"], before["key"][::-1])
    next_ = tiny.tokens(cfg, 2, 2, seed=1)
    expected, _ = feed("transformer_base", cache, next_)
    close(feed("transformer_base", taken, next_[::-1])[0], np.asarray(expected)[::-1])


def test_a_cache_passes_through_jit_and_loops():
    cfg, params = shallow("llama_mqa")
    step = functools.partial(jf.forward_cached, params, cfg=cfg)
    tokens = tiny.tokens(cfg, 1, 5)

    def run(cache, column):
        logits, cache = step(column[:, None], cache=cache)
        return cache, logits[:, 0]

    _, logits = jax.jit(lambda cache: jax.lax.scan(run, cache, tokens.T))(jf.init_cache(cfg, 1, 5))
    close(np.asarray(logits)[:, 0], np.asarray(forward(params, tokens, cfg))[0])


# What does not fit the cache


def test_rewinding_further_than_a_ring_remembers_is_refused():
    """Its slots hold later tokens there; inside jit, where that cannot be said, the row is NaN from then on."""
    cfg, params = model("mistral")
    tokens = tiny.tokens(cfg, 2, 12)
    _, cache = tiny.forward_cached(params, tokens[:, :10], cfg, jf.init_cache(cfg, 2, 24, ahead=2))
    cache.rewind(np.array([8, 10]))
    for used in ([7, 10], [8, 11]):
        with pytest.raises(ValueError, match="rewind to"):
            cache.rewind(np.array(used))
    _, back = tiny.forward_cached(params, tokens[:, 8:9], cfg, cache.rewind(np.array([8, 8])))
    with pytest.raises(ValueError, match="rewind to"):
        back.rewind(np.array([7, 9]))  # two steps back from 9, but three from 10, which the ring has seen
    logits = jax.jit(lambda cache, used: jf.forward_cached(params, tokens[:, 8:9], cfg, cache.rewind(used))[0])(
        cache, np.array([7, 9])
    )
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()


@pytest.mark.parametrize("change", [{"window": 8}, {"window": None}, {"n_layers": 1}, {"n_kv_heads": 4}], ids=str)
def test_a_cache_of_another_config_is_refused(change):
    cfg, params = model("mistral")
    other = dataclasses.replace(cfg, **change)
    with pytest.raises(ValueError, match="made for a different config: layer"):
        jf.forward_cached(tiny.drawn(other), tiny.tokens(cfg, 2, 3), other, jf.init_cache(cfg, 2, 24))
