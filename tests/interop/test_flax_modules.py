"""Configs as modules of Linen and NNX: the numbers, the gradients and the training of the plain functions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import published
import pytest
import tiny
from flax import nnx
from flax.training.train_state import TrainState

import jaxformer as jf

pytestmark = pytest.mark.usefixtures("quick_compilation")
NAMES = ["gpt2", "llama_gqa", "transformer_base"]


def given(cfg):
    """The other inputs that a preset needs."""
    return {"source": tiny.tokens(cfg, seed=1)} if cfg.encoder_layers else {}


def objective(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("name", NAMES)
def test_linen_has_our_tree_our_logits_and_our_gradients(name):
    cfg = tiny.PRESETS[name]
    module, tokens = jf.flax.linen_module(cfg), tiny.tokens(cfg)
    fresh = jax.jit(lambda key: module.init(key, tokens, **given(cfg)))(jax.random.key(0))
    params = tiny.drawn(cfg)
    assert jax.tree.map(jnp.shape, fresh) == {"params": jax.tree.map(jnp.shape, params)}
    like = jax.jit(jf.init, static_argnums=0)(cfg, jax.random.key(0))
    spreads = [[float(leaf.std()) for leaf in jax.tree.leaves(tree)] for tree in (fresh["params"], like)]
    np.testing.assert_allclose(*spreads, rtol=0.5)  # drawn in the same way by other keys, of 16 numbers and more

    def theirs(params):
        return objective(module.apply({"params": params}, tokens, **given(cfg)), tokens)

    def ours(params):
        return objective(jf.forward(params, tokens, cfg, **given(cfg)), tokens)

    found, expected = (jax.jit(jax.value_and_grad(f))(params) for f in (theirs, ours))
    assert float(expected[0]) > 0 and all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(expected[1]["embedding"]))
    equal(found, expected)


@pytest.mark.parametrize("name", NAMES[:2])
def test_nnx_has_our_tree_our_logits_and_our_gradients(name):
    cfg = tiny.PRESETS[name]
    tokens, params = tiny.tokens(cfg), tiny.drawn(cfg)
    module = jf.flax.nnx_module(cfg, params=params)
    equal(nnx.to_pure_dict(nnx.state(module, nnx.Param)), params)
    equal(module.params, params)

    @nnx.jit
    def theirs(module):
        return nnx.value_and_grad(lambda module: objective(module(tokens, **given(cfg)), tokens))(module)

    loss, gradients = theirs(module)
    expected = jax.jit(jax.value_and_grad(lambda params: objective(jf.forward(params, tokens, cfg, **given(cfg)), tokens)))(
        params
    )
    equal((loss, nnx.to_pure_dict(gradients)), expected)


def test_fresh_nnx_parameters_are_those_of_init():
    cfg = tiny.PRESETS["gpt2"]
    module = jf.flax.nnx_module(cfg, nnx.Rngs(3))
    equal(module.params, jf.init(cfg, nnx.Rngs(3).params()))
    for wrong in ({}, {"rngs": nnx.Rngs(0), "params": module.params}):
        with pytest.raises(ValueError, match="either rngs, for fresh parameters, or params"):
            jf.flax.nnx_module(cfg, **wrong)
    other = dataclasses.replace(cfg, d_ff=cfg.d_ff + 1)
    with pytest.raises(ValueError, match=r"differs +decoder\.layers\.mlp"):
        jf.flax.nnx_module(other, params=module.params)


def steps_by_hand(cfg, params, tokens, transform, number):
    state = transform.init(params)

    @jax.jit
    def step(params, state):
        gradients = jax.grad(lambda params: objective(jf.forward(params, tokens, cfg), tokens))(params)
        updates, state = transform.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(number):
        params, state = step(params, state)
    return params


def test_training_under_flax_s_own_states():
    cfg = tiny.PRESETS["llama_gqa"]
    tokens, params, transform = tiny.tokens(cfg), tiny.drawn(cfg), optax.adamw(1e-2)
    expected = steps_by_hand(cfg, params, tokens, transform, 3)
    assert all(np.abs(a - b).max() > 1e-3 for a, b in zip(*map(jax.tree.leaves, (params, expected)), strict=True))

    linen = jf.flax.linen_module(cfg)
    state = TrainState.create(apply_fn=linen.apply, params=params, tx=transform)

    @jax.jit
    def step(state):
        loss = lambda params: objective(state.apply_fn({"params": params}, tokens), tokens)
        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    for _ in range(3):
        state = step(state)
    # XLA may fuse the two programs' updates in other orders: a few units in the last place of values of order 1.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, expected)

    module = jf.flax.nnx_module(cfg, params=params)
    optimizer = nnx.Optimizer(module, transform, wrt=nnx.Param)

    @nnx.jit
    def nnx_step(module, optimizer):
        optimizer.update(module, nnx.grad(lambda module: objective(module(tokens), tokens))(module))

    for _ in range(3):
        nnx_step(module, optimizer)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), module.params, expected)


def test_dropout_is_on_only_where_it_is_asked_for():
    cfg = dataclasses.replace(tiny.PRESETS["gpt2"], residual_dropout=0.5)
    params, tokens = tiny.drawn(cfg), tiny.tokens(cfg)
    still = np.asarray(jf.forward(params, tokens, cfg))
    linen, module = jf.flax.linen_module(cfg), jf.flax.nnx_module(cfg, params=params)
    equal(linen.apply({"params": params}, tokens), still)
    equal(module(tokens), still)
    one, same, other = (
        linen.apply({"params": params}, tokens, deterministic=False, rngs={"dropout": jax.random.key(seed)})
        for seed in (0, 0, 1)
    )
    equal(one, same)
    assert np.abs(one - still).max() > 0.1 and np.abs(one - other).max() > 0.1
    module.train()
    rngs = nnx.Rngs(dropout=0)
    first, second = module(tokens, rngs=rngs), module(tokens, rngs=rngs)
    assert np.abs(first - still).max() > 0.1 and np.abs(first - second).max() > 0.1
    with pytest.raises(ValueError, match="give rngs with a stream named dropout"):
        module(tokens)
    module.eval()
    equal(module(tokens), still)


def test_a_loaded_model_takes_the_place_of_a_removed_class(tmp_path):
    """A cache, hidden states, padding: what the plain functions take."""
    reference = published.folder(tmp_path, "gpt2")
    cfg, params = jf.hf.load(tmp_path)
    module = jf.flax.linen_module(cfg)
    valid = reference["attention_mask"].astype(bool)
    logits = module.apply({"params": params}, reference["input_ids"], valid=valid)
    apart = np.abs(np.asarray(logits) - reference["logits_padded"])[valid].max()
    assert apart < 2e-5 * np.abs(reference["logits_padded"]).max()  # as in test_hf
    hidden = module.apply({"params": params}, reference["input_ids"], valid=valid, hidden=True)
    equal(hidden, jf.hidden(params, reference["input_ids"], cfg, valid=valid))
    prompt, empty = reference["greedy_prompt"], jf.init_cache(cfg, 1, 8)
    first, cache = module.apply({"params": params}, prompt, cache=empty)
    equal(first.argmax(-1)[:, -1], reference["greedy_ids"][:, 5])
    equal((first, cache), jf.forward_cached(params, prompt, cfg, empty))
    equal((first, cache), jf.flax.nnx_module(cfg, params=params)(prompt, cache=empty))
    out = jf.apply(params, prompt, cfg, cache=empty)
    equal(module.apply({"params": params}, prompt, cache=empty, hidden=True), (out.hidden, out.cache))
