"""Listeners are never ignored, and never outlive their block, whatever has been compiled before."""

import collections
import dataclasses
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxformer as jf
from jaxformer.nn import listening

pytestmark = pytest.mark.usefixtures("quick_compilation")
CFG = dataclasses.replace(tiny.PRESETS["llama_gqa"], n_layers=2)
IDS = tiny.tokens(CFG)
OUT = {"decoder.1.out": lambda x: -x}

params_of = functools.cache(tiny.drawn)


def forward(cfg=CFG):
    """A jitted forward that nobody else has compiled."""
    return jax.jit(lambda params, ids: jf.forward(params, ids, cfg))


def both(run, edits=None):
    """What ``run()`` gives inside a block and outside."""
    with jf.listen(OUT if edits is None else edits):
        inside = np.asarray(run())
    return inside, np.asarray(run())


@functools.cache
def expected():
    """The logits without a listener, and with ``OUT``: the final norm is odd, and so is the head."""
    logits = np.asarray(forward()(params_of(CFG), IDS))
    assert np.abs(logits).max() > 1
    return logits, -logits


def close(x, y):
    # the same sums, in an order of the compiler's choice
    np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max(), rtol=0)


@pytest.mark.parametrize("first", ["listening", "plain"])
def test_a_jitted_function_is_edited_inside_the_block_only(first):
    run, (plain, edited) = forward(), expected()
    if first == "plain":
        close(run(params_of(CFG), IDS), plain)
    for _ in range(2):
        inside, outside = both(lambda: run(params_of(CFG), IDS))
        close(inside, edited)
        close(outside, plain)
    assert run._cache_size() == 2, "equal edits are compiled once"


DECODERS = {
    "generate": lambda ids: jf.generate(params_of(CFG), ids, CFG, max_new_tokens=4).tokens,
    "beam_search": lambda ids: jf.beam_search(params_of(CFG), ids, CFG, max_new_tokens=4).tokens,
    "speculative": lambda ids: (
        jf.generate(params_of(CFG), ids, CFG, max_new_tokens=4, draft=jf.PromptLookup(ahead=2, ngram=1)).tokens
    ),
}


@pytest.mark.parametrize("first", ["listening", "plain"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoding_is_edited_inside_the_block_only(name, first):
    jax.clear_caches()
    run = lambda: DECODERS[name](IDS)
    if first == "plain":
        run()
    inside, outside = both(run)
    assert (inside != outside).any()
    programs = jf.compilations()
    again_inside, again_outside = both(run)
    np.testing.assert_array_equal(inside, again_inside)
    np.testing.assert_array_equal(outside, again_outside)
    assert jf.compilations() == programs


class Letters:
    """A tokenizer with a letter for every id."""

    vocab_size, pad_id, eos_id = CFG.vocab_size, 0, -1

    def decode(self, ids):
        return "".join(chr(ord("A") + i) for i in ids)


def test_a_stream_is_edited_where_it_is_read():
    stream = lambda: jf.stream(params_of(CFG), IDS[:1], CFG, Letters(), max_new_tokens=6)
    read = lambda pieces: [token for piece in pieces for token in piece.tokens]
    plain = read(stream())
    with jf.listen(OUT):
        edited = read(stream())
    assert edited == generated(OUT) != plain == generated({"*": lambda x: x})
    with pytest.raises(ValueError, match=r"jf\.stream yields is computed where it is read"), jf.listen({"*.out": lambda x: -x}):
        unread = stream()
    assert read(unread) == plain


def generated(edits):
    with jf.listen(edits):
        return jf.generate(params_of(CFG), IDS[:1], CFG, max_new_tokens=6).tokens[0].tolist()


def test_a_scanned_model_hears_by_layer():
    cfg = dataclasses.replace(CFG, scan=True)
    inside, outside = both(lambda: forward(cfg)(params_of(cfg), IDS))
    close(inside, expected()[1])
    close(outside, expected()[0])


def test_without_edits_kept_programs_are_as_they_were():
    run = forward()
    run(params_of(CFG), IDS)
    run(params_of(CFG), IDS)
    assert run._cache_size() == 1


def test_a_callback_is_called_in_every_block():
    run, counts = forward(), []
    for _ in range(2):
        names = collections.Counter()
        with jf.listen(lambda name, x, names=names: names.update([name]) or x):
            run(params_of(CFG), IDS)
            run(params_of(CFG), IDS)
        counts.append(names)
    assert counts[0] == counts[1] and set(counts[0].values()) == {1}
    assert {"embedding", "decoder.0.attention.weights", "logits"} <= counts[0].keys()


def test_the_same_callback_is_called_again_in_a_second_block():
    run, names = forward(), []

    def listener(name, x):
        names.append(name)
        return x

    for _ in range(2):
        with jf.listen(listener):
            run(params_of(CFG), IDS)
    assert names.count("logits") == 2


def activation(x=1.0, name="a"):
    return jf.named(jnp.full((1, 2, 32), x), name, "BTD", CFG)


def test_edits_are_applied_in_the_order_of_the_dict():
    with jf.listen({"a": lambda x: x + 1, "*": lambda x: x * 3}):
        assert activation()[0, 0, 0] == 6
    with jf.listen({"*": lambda x: x * 3, "a": lambda x: x + 1}):
        assert activation()[0, 0, 0] == 4


def test_an_inner_listener_hears_what_the_outer_one_has_made_and_captures_see_the_result():
    def run():
        with jf.listen({"a": lambda x: x * 3}):
            return activation()

    with jf.listen({"a": lambda x: x + 1}):
        out, seen = jf.capture(run)()
    assert out[0, 0, 0] == seen["a"][0, 0, 0] == 6


def test_listening_ends_with_the_block_and_with_its_error():
    seen = []
    with pytest.raises(RuntimeError, match="the body's own"), jf.listen({"no such name": jnp.zeros_like}):
        raise RuntimeError("the body's own")
    with pytest.raises(RuntimeError), jf.listen(lambda name, x: seen.append(name) or x):
        activation(name="a")
        raise RuntimeError
    activation(name="b")
    assert seen == ["a"] and not listening.anyone()


@pytest.mark.parametrize("first", [True, False])
def test_a_pattern_that_matches_nothing_names_the_nearest(first):
    edits = {"decoder.1.out": jnp.zeros_like, "decoder.1.atention.weights": jnp.zeros_like}
    run = forward()
    if first:
        run(params_of(CFG), IDS)
    for _ in range(2):
        with (
            pytest.raises(
                ValueError, match=r"no activation matches 'decoder\.1\.atention.*mean 'decoder\.1\.attention\.weights'"
            ),
            jf.listen(edits),
        ):
            run(params_of(CFG), IDS)


@pytest.mark.parametrize("listener", [{"*": jnp.zeros_like}, lambda name, x: x], ids=["dict", "callback"])
def test_a_listener_that_hears_nothing_says_why(listener):
    compiled = forward().lower(params_of(CFG), IDS).compile()
    with pytest.raises(ValueError, match=r"was never called.*compiled ahead of time.*jf\.stream"), jf.listen(listener):
        compiled(params_of(CFG), IDS)


@pytest.mark.parametrize(
    ("listener", "message"),
    [
        ({}, "is empty"),
        (None, r"must be a dict \{pattern: edit\} or a function \(name, x\) -> x, not None"),
        ({"a": 3}, "functions x -> x by pattern, not 'a': 3"),
        ({3: jnp.zeros_like}, "functions x -> x by pattern, not 3"),
    ],
)
def test_wrong_listeners_are_refused(listener, message):
    with pytest.raises(ValueError, match=message), jf.listen(listener):
        activation()


def test_an_edit_that_is_not_hashable_is_refused():
    class Unhashable:
        __hash__ = None

        def __call__(self, x):
            return x

    with pytest.raises(ValueError, match="edits must be hashable"), jf.listen({"a": Unhashable()}):
        activation()


@pytest.mark.parametrize(
    ("edit", "made"),
    [
        (lambda x: None, "NoneType"),
        (lambda x: x[:, :1], r"float32\[1, 1, 32\]"),
        (lambda x: x.astype(jnp.float16), r"float16\[1, 2, 32\]"),
    ],
)
def test_an_edit_must_keep_shape_and_dtype(edit, made):
    message = rf"a listener turned activation 'a' into {made}, but it must stay float32\[1, 2, 32\]"
    with pytest.raises(ValueError, match=message), jf.listen({"a": edit}):
        activation()


def test_listeners_live_no_longer_than_the_programs_they_are_compiled_into():
    run = forward()
    edits = {"decoder.0.out": lambda x: 2 * x}
    with jf.listen(edits):
        run(params_of(CFG), IDS)
    key = tuple(edits.items())
    gc.collect()
    assert key in listening._shared
    jax.clear_caches()
    gc.collect()
    assert key not in listening._shared


def test_capture_takes_several_patterns():
    _, seen = jf.capture(lambda: (activation(name="a"), activation(name="b"), activation(name="c")), "a", "c")()
    assert seen.keys() == {"a", "c"}
    with pytest.raises(ValueError, match="no activation matches 'd'; known: a"):
        jf.capture(activation, "a", "d")()


@pytest.mark.parametrize(
    "inner",
    [
        jax.jit,
        lambda f: lambda: jax.lax.map(lambda _: f(), jnp.arange(2)),
        lambda f: lambda: jax.grad(lambda x: activation(x).sum())(1.0),
    ],
)
def test_capture_of_what_cannot_leave_says_so(inner):
    with pytest.raises(ValueError, match="activation 'a' is computed inside a jitted function, a loop or a gradient of f"):
        jf.capture(inner(activation))()


def test_capture_of_a_compiled_function_says_so():
    compiled = jax.jit(activation)
    compiled()
    with pytest.raises(ValueError, match="no activation was traced: f must call the model, and must not be jitted"):
        jf.capture(compiled)()


def test_a_pattern_must_match_in_every_block_that_traces_something():
    """An equal dict shares programs with an earlier block, and not what it has heard there."""
    smaller = dataclasses.replace(CFG, n_layers=1)
    edits = {"decoder.1.out": jnp.negative}
    with jf.listen(edits):
        forward()(params_of(CFG), IDS)
    with pytest.raises(ValueError, match="no activation matches 'decoder.1.out'"), jf.listen(dict(edits)):
        forward(smaller)(params_of(smaller), IDS)
