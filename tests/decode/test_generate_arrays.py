"""Generation inside the user's own programs: the tokens of ``generate`` under jit, vmap, scan, shard_map and on a mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import AxisType, PartitionSpec

import jaxformer as jf
from jaxformer.decode import generate_arrays
from jaxformer.parallel.sharding import MeshConfig

pytestmark = pytest.mark.usefixtures("quick_compilation")
CFG = dataclasses.replace(tiny.PRESETS["llama_gqa"], n_layers=1)
PROMPTS = [[5, 9, 11], [7, 3, 20, 41, 13, 8, 30]]
LENGTHS = np.array([3, 7])
NEW = 6
KEY = jax.random.key(3)
DRAWN = jf.Sampling(temperature=1.5, top_k=20, repetition_penalty=1.2)
# of logits below 100, by programs that the compiler fuses in another way
CLOSE = {"rtol": 0, "atol": 1e-4}


def arrays(rows=PROMPTS, filler=66):
    """The prompts [B, T], each row filled up with what must not be read."""
    width = max(map(len, rows))
    return np.array([row + [filler] * (width - len(row)) for row in rows]), np.array([len(row) for row in rows])


@functools.cache
def params_of(cfg=CFG, seed=0):
    return tiny.drawn(cfg, seed)


def assert_same(found: jf.Generated, expected: jf.Generated):
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, **CLOSE)
    for name in ("top_tokens", "top_logprobs", "acceptance"):
        assert (getattr(found, name) is None) == (getattr(expected, name) is None)
        if getattr(found, name) is not None:
            np.testing.assert_allclose(getattr(found, name), getattr(expected, name), **CLOSE)


def differ(one: jf.Generated, other: jf.Generated):
    return not np.array_equal(one.tokens, other.tokens)


OPTIONS = {
    "greedy": {"top_logprobs": 2, "prefill_chunk": 3},
    "drawn": {"sampling": DRAWN, "key": KEY, "eos": (3, 4, 5, 6, 8, 30), "pad": 1, "num_return": 2},
    "rows": {"sampling": [DRAWN, jf.Sampling(temperature=0.0, banned=(4,))], "key": KEY, "cache_dtype": "bfloat16"},
    "look-up": {"draft": jf.PromptLookup(ahead=2, ngram=1), "sampling": DRAWN, "key": KEY},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["mistral", "transformer_base"])
def test_under_jit_it_is_generate(name, options):
    cfg, given = dataclasses.replace(tiny.PRESETS[name], n_layers=1), OPTIONS[options] | tiny.inputs(tiny.PRESETS[name])
    params, (prompts, lengths) = params_of(cfg), arrays()
    expected = jf.generate(params, PROMPTS, cfg, max_new_tokens=NEW, **given)
    source = {name: given.pop(name) for name in ("source", "source_valid") if name in given}
    run = jax.jit(
        lambda params, prompts, lengths, source: generate_arrays(
            params, prompts, lengths, cfg, max_new_tokens=NEW, **given, **source
        )
    )
    found = run(params, prompts, lengths, source)
    assert_same(found, expected)
    longer = run(params, prompts, np.full(2, prompts.shape[1]), source)
    assert np.abs(longer.logprobs - expected.logprobs).max() > 0.01, "what fills a row would be seen"


def test_constants_are_checked_inside_jit_too():
    prompts, lengths = map(jnp.asarray, arrays())
    sampling = {"temperature": jnp.array([0.7, 1.5])}
    run = lambda params, prompts=prompts: generate_arrays(
        params, prompts, lengths, CFG, max_new_tokens=NEW, sampling=sampling, key=KEY
    )
    assert_same(jax.jit(run)(params_of()), run(params_of()))
    wrong = prompts.at[0, 0].set(-1)
    with pytest.raises(ValueError, match="row 0 of prompts is wrong"):
        jax.jit(lambda params: run(params, wrong))(params_of())


def test_a_draft_model_may_be_traced():
    draft = params_of(seed=1)
    expected = jf.generate(params_of(), PROMPTS, CFG, max_new_tokens=NEW, draft=jf.DraftModel(draft, CFG, ahead=2))
    run = jax.jit(
        lambda params, draft: generate_arrays(
            params, *arrays(), CFG, max_new_tokens=NEW, draft=jf.DraftModel(draft, CFG, ahead=2)
        )
    )
    assert_same(run(params_of(), draft), expected)


# vmap


def test_vmap_over_keys_and_temperatures():
    keys, temperatures = jax.random.split(KEY, 3), np.array([0.0, 0.5, 3.0], np.float32)

    def run(key, temperature):
        sampling = {"temperature": temperature, "top_k": 20, "repetition_penalty": 1.2}
        return generate_arrays(params_of(), *arrays(), CFG, max_new_tokens=NEW, sampling=sampling, key=key, eos=(3, 30))

    found = jax.jit(jax.vmap(run))(keys, temperatures)
    for i in range(3):
        sampling = dataclasses.replace(DRAWN, temperature=float(temperatures[i]))
        expected = jf.generate(params_of(), PROMPTS, CFG, max_new_tokens=NEW, sampling=sampling, key=keys[i], eos=(3, 30))
        assert_same(jax.tree.map(lambda x: x[i], found), expected)  # noqa: B023
    assert len(np.unique(found.tokens[:, 0], axis=0)) == 3


def test_vmap_over_parameters():
    members = [params_of(seed=seed) for seed in (0, 1)]
    run = lambda params: generate_arrays(params, *arrays(), CFG, max_new_tokens=NEW, sampling=DRAWN, key=KEY)
    found = jax.jit(jax.vmap(run))(jax.tree.map(lambda *x: jnp.stack(x), *members))
    for i, member in enumerate(members):
        expected = jf.generate(member, PROMPTS, CFG, max_new_tokens=NEW, sampling=DRAWN, key=KEY)
        assert_same(jax.tree.map(lambda x: x[i], found), expected)  # noqa: B023
    assert differ(*(jax.tree.map(lambda x: x[i], found) for i in (0, 1)))  # noqa: B023


def test_vmap_over_prompts():
    """A row each, with a length and a key of its own."""
    prompts, lengths = arrays()
    keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY, jnp.arange(2))
    expected = jf.generate(params_of(), PROMPTS, CFG, max_new_tokens=NEW, sampling=DRAWN, key=KEY)
    run = lambda prompt, length, key: generate_arrays(
        params_of(), prompt[None], length[None], CFG, max_new_tokens=NEW, sampling=DRAWN, key=key[None]
    )
    found = jax.jit(jax.vmap(run))(prompts, lengths, keys)
    assert_same(jax.tree.map(lambda x: x[:, 0], found), expected)
    assert_same(jf.generate(params_of(), PROMPTS, CFG, max_new_tokens=NEW, sampling=DRAWN, key=keys), expected)


# scan


def test_inside_a_scan_that_feeds_what_it_has_generated():
    """Three rounds, each of which goes on from the end of the last, with other parameters."""
    prompts, lengths, new = *arrays(), 3
    params = params_of()

    @jax.jit
    def rollout(params, prompts, lengths):
        def step(carry, key):
            prompts, lengths, params = carry
            out = generate_arrays(params, prompts, lengths, CFG, max_new_tokens=new, sampling=DRAWN, key=key)
            longer = jnp.pad(prompts, ((0, 0), (0, new)))
            at = lengths[:, None] + jnp.arange(new)
            longer = longer.at[jnp.arange(2)[:, None], at].set(out.tokens)
            keep = jnp.maximum(lengths + new - prompts.shape[1], 0)[:, None] + jnp.arange(prompts.shape[1])
            prompts = jnp.take_along_axis(longer, keep, axis=1)
            lengths = jnp.minimum(lengths + new, prompts.shape[1])
            return (prompts, lengths, jax.tree.map(lambda p: 1.1 * p, params)), (out.tokens, out.logprobs)

        return jax.lax.scan(step, (prompts, lengths, params), jax.random.split(KEY, 3))[1]

    tokens, logprobs = rollout(params, jnp.asarray(prompts), jnp.asarray(lengths))
    rows = [list(row) for row in PROMPTS]
    for number, key in enumerate(jax.random.split(KEY, 3)):
        expected = jf.generate(params, rows, CFG, max_new_tokens=new, sampling=DRAWN, key=key)
        np.testing.assert_array_equal(tokens[number], expected.tokens)
        np.testing.assert_allclose(logprobs[number], expected.logprobs, **CLOSE)
        rows = [(row + out)[-7:] for row, out in zip(rows, np.asarray(expected.tokens).tolist(), strict=True)]
        params = jax.tree.map(lambda p: 1.1 * p, params)
    assert len(np.unique(tokens[:, 0], axis=0)) == 3


# Many devices

ROWS = [[5 + i, 9, 11][: 1 + i % 3] for i in range(8)]


@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_on_a_mesh(axes):
    params, (prompts, lengths) = params_of(), arrays(ROWS)
    given = {"max_new_tokens": NEW, "sampling": DRAWN, "key": KEY, "eos": (30,)}
    expected = jf.generate(params, ROWS, CFG, **given)
    with jax.set_mesh(MeshConfig(**axes).make()):
        run = jax.jit(lambda params, prompts, lengths: generate_arrays(params, prompts, lengths, CFG, **given))
        rows = PartitionSpec(("data", "fsdp"))
        found = run(params, jax.device_put(prompts, rows), jax.device_put(lengths, rows))
    assert len(found.tokens.sharding.device_set) == 8
    assert_same(found, expected)


def test_in_shard_map():
    """One row per device, with the row's own key: the rows of one call."""
    params, (prompts, lengths) = params_of(), arrays(ROWS)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY, jnp.arange(8))
    expected = jf.generate(params, ROWS, CFG, max_new_tokens=NEW, sampling=DRAWN, key=KEY)
    mesh, rows = jax.make_mesh((8,), ("devices",), axis_types=(AxisType.Auto,)), PartitionSpec("devices")
    run = lambda params, prompts, lengths, key: generate_arrays(
        params, prompts, lengths, CFG, max_new_tokens=NEW, sampling=DRAWN, key=key
    )
    placed = (PartitionSpec(), rows, rows, rows)
    found = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=placed, out_specs=rows))(params, prompts, lengths, keys)
    assert_same(found, expected)


# Sampling by arrays

VALUES = {  # of every row, and of each
    "numbers": ({"temperature": 0.7, "top_p": 0.9, "min_p": 0.05}, [{"temperature": 0.7, "top_p": 0.9, "min_p": 0.05}] * 2),
    "a row each": (
        {"temperature": np.array([0.0, 2.0]), "top_k": np.array([0, 5]), "min_new_tokens": np.array([4, 2])},
        [{"temperature": 0.0, "min_new_tokens": 4}, {"temperature": 2.0, "top_k": 5, "min_new_tokens": 2}],
    ),
    "penalties": (
        {"presence_penalty": np.array([3.0, 0.0]), "frequency_penalty": 1.5, "typical_p": np.array([0.5])},
        [{"presence_penalty": each, "frequency_penalty": 1.5, "typical_p": 0.5} for each in (3.0, 0.0)],
    ),
    "a bias": (
        {"logit_bias": np.where(np.isin(np.arange(67), (7, 12)), 9.0, np.where(np.arange(67) < 30, 0.0, -np.inf))},
        [{"logit_bias": ((7, 9.0), (12, 9.0)), "banned": tuple(set(range(30, 67)))}] * 2,
    ),
    "a function": ({"transform": jnp.negative}, [{"transform": jnp.negative}] * 2),
}


@pytest.mark.parametrize("case", VALUES)
def test_traced_values_are_those_of_sampling(case):
    values, each = VALUES[case]
    given = {"max_new_tokens": NEW, "key": KEY, "eos": (30, 31), "num_return": 2}
    expected = jf.generate(params_of(), PROMPTS, CFG, sampling=[jf.Sampling(**fields) for fields in each], **given)
    assert differ(jf.generate(params_of(), PROMPTS, CFG, sampling=jf.Sampling(), **given), expected), "they matter"
    static = {name: values[name] for name in values if name == "transform"}
    run = jax.jit(lambda traced: generate_arrays(params_of(), *arrays(), CFG, sampling=traced | static, **given))
    assert_same(run({name: value for name, value in values.items() if name not in static}), expected)
    assert_same(jf.generate(params_of(), PROMPTS, CFG, sampling=values, **given), expected)


# What cannot be checked is NaN, and what can is refused


@pytest.mark.parametrize("change", ["length 0", "length past the end", "id past the vocabulary", "negative id"])
def test_a_wrong_row_is_nan_under_jit_and_refused_outside(change):
    prompts, lengths = arrays()
    if "length" in change:
        lengths[1] = 0 if "0" in change else 8
    else:
        prompts[1, 2] = -1 if "negative" in change else CFG.vocab_size
    given = {"max_new_tokens": NEW, "top_logprobs": 2, "eos": (30,), "num_return": 2}
    expected = jf.generate(params_of(), PROMPTS, CFG, **given)
    found = jax.jit(lambda *rows: generate_arrays(params_of(), *rows, CFG, **given))(prompts, lengths)
    for name in ("logprobs", "top_logprobs"):
        assert np.isnan(getattr(found, name)[1]).all() and np.isfinite(getattr(found, name)[0]).all()
    np.testing.assert_array_equal(found.tokens[0], expected.tokens[0])
    with pytest.raises(ValueError, match=r"row 1 of prompts is wrong: its length . must be from 1 to 7"):
        generate_arrays(params_of(), prompts, lengths, CFG, **given)


WRONG_VALUES = {"temperature": -1.0, "top_p": 1.5, "min_p": np.nan, "typical_p": -0.1, "top_k": -1, "min_new_tokens": -2}
WRONG_VALUES |= {"repetition_penalty": 0.0, "presence_penalty": np.inf}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_a_wrong_value_is_nan_under_jit_and_refused_outside(name):
    right = {"top_k": 0, "min_new_tokens": 0}.get(name, 1.0)
    values = np.array([right, WRONG_VALUES[name]])
    run = lambda value: generate_arrays(params_of(), *arrays(), CFG, max_new_tokens=2, sampling={name: value}, key=KEY)
    logprobs = np.asarray(jax.jit(run)(values).logprobs)
    assert np.isnan(logprobs[1]).all() and np.isfinite(logprobs[0]).all()
    with pytest.raises(ValueError, match=f"sampling's {name}=.* is out of range"):
        run(values)


REFUSED = [
    ({"sampling": {"temprature": 1.0}}, r"unknown entry 'temprature'.*did you mean 'temperature'"),
    ({"sampling": {"top_k": 0.5}}, r"top_k must be integers of shape \[\] or \[2\], not float64"),
    ({"sampling": {"temperature": np.ones(3)}}, r"temperature must be numbers of shape \[\] or \[2\]"),
    ({"sampling": {"logit_bias": np.ones(3)}}, r"logit_bias must have the shape \[67\] or \[2, 67\]"),
    ({"sampling": {"temperature": 1.0}}, "sampling needs key"),
    ({"sampling": DRAWN, "key": jax.random.split(KEY, 3)}, r"one random key.*or one per output \(2\)"),
    ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ({"lengths_B": np.array([3])}, r"lengths \[batch\], not \(2, 7\) and \(1,\)"),
    ({"lengths_B": np.array([3.0, 7.0])}, "lengths must be integers"),
    ({"prompts_BT": np.ones((2, 7))}, "prompts must be integers"),
    ({"prompts_BT": np.full((2, 7), 2**32 + 5)}, "row 0 of prompts is wrong"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_known_is_refused(change, message):
    prompts, lengths = arrays()
    given = {"prompts_BT": prompts, "lengths_B": lengths, "max_new_tokens": 2} | change
    with pytest.raises(ValueError, match=message):
        generate_arrays(params_of(), cfg=CFG, **given)


def test_the_end_of_a_learned_table_by_the_longest_prompt_that_there_may_be():
    cfg = dataclasses.replace(CFG, position="learned", max_length=10)
    params, (prompts, lengths) = params_of(cfg), arrays()
    run = lambda new: jax.jit(lambda *rows: generate_arrays(params, *rows, cfg, max_new_tokens=new))(prompts, lengths)
    assert_same(run(4), jf.generate(params, PROMPTS, cfg, max_new_tokens=4))
    with pytest.raises(ValueError, match="a prompt of 7 and 5 new tokens go past the learned table"):
        run(5)
    with pytest.raises(ValueError, match="inside jit, use jf.decode.generate_arrays"):
        jax.jit(lambda prompts: jf.generate(params, prompts, cfg, max_new_tokens=2))(prompts)


def test_a_listener_changes_what_is_traced_inside_and_nothing_after():
    run = jax.jit(lambda params, prompts, lengths: generate_arrays(params, prompts, lengths, CFG, max_new_tokens=NEW))
    call = lambda: run(params_of(), *arrays())
    plain, edits = call(), {"decoder.0.mlp.out": jnp.negative}
    with jf.listen(edits):
        patched = call()
        assert_same(patched, jf.generate(params_of(), PROMPTS, CFG, max_new_tokens=NEW))
    assert differ(patched, plain)
    assert_same(call(), plain)
