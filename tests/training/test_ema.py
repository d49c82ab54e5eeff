"""The mean of the parameters that the optimizer's state holds, and that a run evaluates and gives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxformer as jf
from jaxformer.training.ema import EmaState, ema_params
from jaxformer.training.optim import optimizer
from jaxformer.training.run import write_run
from tests import states, tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")

CFG = jf.presets.llama(vocab_size=11, d_model=8, n_layers=1, n_heads=2, d_ff=12)
OPTIM = jf.OptimConfig(lr=0.1, schedule="constant", warmup_steps=0)
DECAY = 0.7


def trained(cfg, optim, steps):
    """Parameters after each update, and the last state."""
    params = jax.tree.map(lambda p: p.astype(cfg.param_dtype), tiny.drawn(cfg))
    transform = optimizer(optim, cfg, 10)
    state, history, update = transform.init(params), [params], jax.jit(transform.update)
    for step in range(steps):
        rng = np.random.default_rng(step)
        grads = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), p.dtype), params)  # noqa: B023
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        history.append(params)
    return history, state


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mean_by_hand(dtype):
    cfg, steps = dataclasses.replace(CFG, param_dtype=dtype), 4
    history, state = trained(cfg, dataclasses.replace(OPTIM, ema=DECAY), steps)
    alone, _ = trained(cfg, OPTIM, steps)
    jax.tree.map(np.testing.assert_array_equal, history, alone)  # what is trained is the same

    weights = DECAY ** np.arange(steps - 1, -1, -1)
    weights /= weights.sum()
    found = ema_params(state, history[-1])
    for path, leaf in jf.spec.walk(found):
        values = [np.asarray(dict(jf.spec.walk(params))[path], np.float64) for params in history[1:]]
        expected = sum(weight * value for weight, value in zip(weights, values, strict=True))
        assert leaf.dtype == dtype
        assert np.abs(expected - values[-1]).max() > 0.02
        # of bfloat16 the mean is of the float32 copies, whose roundings are 2^-9 of them away
        tolerance = {"float32": 1e-6, "bfloat16": 1e-2}[dtype]
        np.testing.assert_allclose(np.asarray(leaf, np.float64), expected, rtol=tolerance, atol=tolerance, err_msg=path)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.ema)} == {jnp.dtype("float32")}


def test_before_the_first_update_and_after_it_the_mean_is_the_parameters():
    for steps in (0, 1):
        history, state = trained(CFG, dataclasses.replace(OPTIM, ema=DECAY), steps)
        near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
        jax.tree.map(near, ema_params(state, history[0]), history[-1])
    assert isinstance(state, EmaState) and int(state.updates) == 1


def test_of_a_decay_near_1_the_weights_still_add_up_to_1():
    history, state = trained(CFG, dataclasses.replace(OPTIM, ema=0.99999), 3)
    expected = jax.tree.map(lambda *values: sum(values) / 3, *history[1:])
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)  # equal weights, up to 1e-5 of them
    jax.tree.map(near, ema_params(state, history[-1]), expected)


def test_without_a_mean_the_parameters_are_given_back():
    history, state = trained(CFG, OPTIM, 0)
    assert ema_params(state, history[0]) is history[0]


def test_no_buffer_of_a_fresh_state_is_the_parameters_own():
    """A compiled update reuses the buffers of the state that it is given: none may be there twice."""
    history, state = trained(CFG, dataclasses.replace(OPTIM, ema=DECAY), 0)
    transform = optimizer(dataclasses.replace(OPTIM, ema=DECAY), CFG, 10)
    step = jax.jit(lambda params, state: transform.update(params, state, params), donate_argnums=(0, 1))
    jax.block_until_ready(step(history[0], state))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_gives_the_mean_or_the_parameters(tmp_path, dtype):
    cfg = dataclasses.replace(CFG, vocab_size=256, param_dtype=dtype)
    optim = dataclasses.replace(OPTIM, ema=DECAY)
    history, opt_state = trained(cfg, optim, 3)
    write_run(tmp_path, jf.Config(model=cfg, optim=optim), jf.tokenizer.train("byte", []))
    state = states.TrainState(jnp.int32(3), history[-1], opt_state, jax.random.key(0))
    states.save(tmp_path / "checkpoints", state)
    mean = ema_params(opt_state, history[-1])
    assert (mean["embedding"]["token"] != history[-1]["embedding"]["token"]).any()
    for keyword, expected in ({}, mean), ({"ema": True}, mean), ({"ema": False}, history[-1]):
        params = jf.load(tmp_path, **keyword)[1]
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
        jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_the_mean_of_a_run_that_keeps_none_is_refused(tmp_path):
    write_run(tmp_path, jf.Config(model=CFG), jf.tokenizer.train("byte", []))
    with pytest.raises(ValueError, match=r"has no running mean .*optim.ema=0"):
        jf.load(tmp_path, ema=True)
