"""Mistakes of a first call: a config works in jit without static_argnums, other libraries' keywords are answered in words."""

import copy
import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxformer as jf
from jaxformer.nn import mistakes
from jaxformer.training import objective

pytestmark = pytest.mark.usefixtures("quick_compilation")
CFG = dataclasses.replace(tiny.PRESETS["llama_gqa"], n_layers=1)
OTHER = dataclasses.replace(CFG, logit_softcap=1.0)
T = [[5, 6, 7]]
params_of = functools.cache(tiny.drawn)


@pytest.mark.parametrize("options", [{}, {"static_argnums": 2}, {"static_argnames": "cfg"}], ids=str)
def test_a_config_is_an_argument_of_jitted_functions(options):
    jax.clear_caches()
    run = jax.jit(jf.forward, **options)
    plain, other = (np.asarray(run(params_of(CFG), T, cfg)) for cfg in (CFG, OTHER))
    assert np.abs(other).max() < 1 < np.abs(plain).max()
    run(params_of(CFG), T, dataclasses.replace(OTHER))
    assert run._cache_size() == 2, "equal configs are one"
    if "static_argnums" not in options:
        np.testing.assert_array_equal(run(params_of(CFG), T, cfg=OTHER), other)


def test_a_config_is_an_argument_of_other_transformations():
    batch = tiny.batch(CFG)
    gradient = jax.jit(jax.grad(lambda *inputs: jf.loss(*inputs)[0]))(params_of(CFG), batch, CFG)
    assert jax.tree.structure(gradient) == jax.tree.structure(params_of(CFG))
    shapes = jax.eval_shape(jf.init, CFG, jax.random.key(0))
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params_of(CFG))
    logits = jax.vmap(jf.forward, in_axes=(None, 0, None))(params_of(CFG), jnp.array([T, T]), CFG)
    assert logits.shape == (2, 1, 3, 67)


def test_a_config_passes_through_trees_as_it_is():
    tree = {"cfg": CFG, "x": jnp.ones(3)}
    doubled = jax.tree.map(lambda x: 2 * x, tree)
    assert doubled["cfg"] == CFG and doubled["x"][0] == 2 and len(jax.tree.leaves(tree)) == 1
    assert copy.deepcopy(CFG) == CFG


@pytest.mark.parametrize("cfg", [None, {"d_model": 32}, T], ids=["None", "dict", "tokens"])
def test_what_is_not_a_config_is_refused(cfg):
    uses = [jf.forward, jf.hidden, functools.partial(jf.generate, max_new_tokens=1)]
    for use in uses:
        with pytest.raises(ValueError, match="cfg must be a ModelConfig, the third argument after params and tokens"):
            use(params_of(CFG), T, cfg)


FORWARD, GENERATE = ("forward", "hidden", "apply"), ("generate", "stream", "beam_search")
CALLS = [
    (FORWARD, "attention_mask", r"use valid=attention_mask\.astype\(bool\), True for a real token"),
    ("loss", "attention_mask", r"in the batch, use valid=attention_mask\.astype\(bool\)"),
    ("loss", "valid", "put it into the batch, as 'valid'"),
    (FORWARD, "input_ids", r"use tokens, the ids \[B, T\]"),
    ("loss", "input_ids", r"in the batch, use tokens, the ids \[B, T\]"),
    (GENERATE, "input_ids", "use prompts, lists of ids"),
    (FORWARD, "decoder_input_ids", "use tokens"),
    (FORWARD, "labels", r'jf\.loss\(params, \{"tokens": \.\.\., "targets"'),
    ("loss", "labels", "in the batch, use targets, the token after each position, already shifted"),
    (GENERATE, "max_tokens", "use max_new_tokens=, counted without the prompt"),
    (GENERATE, "max_length", "use max_new_tokens=, counted without the prompt"),
    ("init_cache", "max_length", "use max_len="),
    ("init_cache", "batch_size", "use batch, the number of rows"),
    (("forward", "hidden"), "cache", r"logits, cache = jf\.forward_cached\(params, tokens, cfg, cache\)"),
    (
        ("forward", "generate"),
        "past_key_values",
        r"jf\.forward_cached\(params, tokens, cfg, cache\).*jf\.generate makes its own",
    ),
    (("apply", "forward_cached"), "past_key_values", r"use a cache of jf\.init_cache\(cfg, batch, max_len\)"),
    (("generate", "stream"), "do_sample", r"use sampling=jf\.Sampling\(\) and key="),
    (("generate", "stream"), "temperature", r"use sampling=jf\.Sampling\(temperature=\.\.\.\) and.*key="),
    ("beam_search", "top_p", r"jf\.generate\(\.\.\., sampling=jf\.Sampling\(\.\.\.\), key=.*samples"),
    ("generate", "num_beams", r"jf\.beam_search\(params, prompts, cfg, max_new_tokens=\.\.\., num_beams="),
    ("generate", "num_return_sequences", "use num_return="),
    (GENERATE, "eos_token_id", "use eos=, one id or several"),
    (("generate", "beam_search"), "pad_token_id", "use pad="),
    ("generate", "stop", r"jf\.stream\(params, prompts, cfg, tok, stop="),
    ((*FORWARD, "loss"), "dropout_rng", r"use key=jax\.random\.key\(seed\)"),
    (("forward", "generate"), "prng_key", r"use key=jax\.random\.key\(seed\)"),
    (("forward", "generate"), "rng", r"use key=jax\.random\.key\(seed\)"),
    (("forward", "loss"), "train", r"use key=jax\.random\.key\(seed\) for dropout, and no key without"),
    ("forward", "deterministic", "no key for deterministic=True"),
    (("forward", "hidden"), "routed", r"jf\.apply\(params, tokens, cfg, counted=True\)\.routing"),
    ("forward", "position_ids", "use positions=position_ids"),
    ("forward", "inputs_embeds", r"use embeddings=inputs_embeds \[B, T, D\], with tokens=None"),
    ("forward", "output_attentions", r"jf\.capture\(f, \"\*attention\.weights\"\)"),
    ("forward", "dtype", r"dataclasses\.replace\(cfg, dtype="),
    ("forward", "postions", "; did you mean 'positions'?"),
    ("generate", "max_new_token", "; did you mean 'max_new_tokens'?"),
]
CALLS = [(name, *call) for names, *call in CALLS for name in ((names,) if isinstance(names, str) else names)]


@pytest.mark.parametrize(("name", "keyword", "answer"), CALLS, ids=[f"{name} {keyword}" for name, keyword, _ in CALLS])
def test_a_wrong_keyword_is_answered(name, keyword, answer):
    with pytest.raises(TypeError, match=rf"{name}\(\) takes no keyword '{keyword}'.*{answer}"):
        getattr(jf, name)(params_of(CFG), T, CFG, **{keyword: 1})


def test_a_wrong_keyword_is_answered_inside_jit():
    with pytest.raises(TypeError, match="use valid=attention_mask"):
        jax.jit(jf.forward, static_argnums=2)(params_of(CFG), jnp.array(T), CFG, attention_mask=jnp.ones((1, 3)))


def test_other_mistakes_of_a_call_are_python_s():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'cfg'"):
        jf.forward(params_of(CFG), T)
    with pytest.raises(TypeError, match="takes 3 positional arguments but 4 were given"):
        jf.forward(params_of(CFG), T, CFG, None)


DECORATED = ("init", "init_cache", "forward_cached", "loss", *FORWARD, *GENERATE)


@pytest.mark.parametrize("name", DECORATED)
def test_signatures_and_docstrings_are_kept(name):
    function = getattr(jf, name)
    assert function.__name__ == name and function.__doc__ == function.__wrapped__.__doc__ is not None
    assert "cfg" in inspect.signature(function).parameters


def test_every_answer_names_an_argument_or_entry_that_exists():
    known = {name for function in DECORATED for name in inspect.signature(getattr(jf, function)).parameters}
    for words, right, text in mistakes.ANSWERS:
        assert not right or right in known | set(objective.REQUIRED), right
        assert all(text.format(word) for word in words.split())
