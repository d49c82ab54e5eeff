"""Parameters below float32 are the rounding of float32 copies, and train as well."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

import jaxformer as jf
from jaxformer.training.ema import with_ema
from jaxformer.training.master import MasterState, with_master
from jaxformer.training.optim import RULES, from_rule, optimizer
from jaxformer.training.update import init_state, make_update
from tests import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")

LOW = jf.presets.llama(vocab_size=32, d_model=16, n_layers=2, n_heads=2, d_ff=32, param_dtype="bfloat16")
FULL = jf.presets.llama(vocab_size=32, d_model=16, n_layers=2, n_heads=2, d_ff=32)
as_given = optax.GradientTransformation(lambda params: optax.EmptyState(), lambda updates, state, params: (updates, state))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parameters_are_the_rounding_of_their_copies_for_every_value(dtype):
    """All finite values of the dtype, moved by numbers of every size, to next to 0, and by next to nothing."""
    every = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype))
    limit = float(jnp.finfo(dtype).max) / 8
    values = every[np.abs(every.astype(np.float32)) < limit]
    rng = np.random.default_rng(0)
    transform = with_master(as_given)

    @jax.jit
    def step(p, u, state):
        updates, state = transform.update(u, state, p)
        return optax.apply_updates(p, updates), state

    moved = near_zero = 0
    for size in (1e-30, 1e-8, 1e-4, 1e-2, 1.0, 100.0):
        p = jnp.asarray(values)
        state = transform.init(p)
        for _ in range(3):
            before = np.asarray(state.master, np.float64)
            u = size * rng.standard_normal(len(values))
            u[::3] *= np.abs(before[::3])
            u[1::3] = -before[1::3] * (1 + rng.choice([0, 1e-6, 1e-3], len(u[1::3])))
            u = np.clip(u, -limit, limit).astype(np.float32)
            exact = before + u
            p, state = step(p, jnp.asarray(u), state)
            master = np.asarray(state.master)
            np.testing.assert_array_equal(np.asarray(p).view(np.uint16), master.astype(dtype).view(np.uint16))
            # float32's rounding of the larger of the two numbers, three times; its subnormals may be flushed
            scale = np.maximum(np.abs(exact), np.abs(before))
            assert (np.abs(master - exact) <= 2.0**-21 * scale + 1e-37).all()
            moved += (np.asarray(p) != values).sum()
            near_zero += ((np.abs(exact) < 1e-4 * np.abs(before)) & (exact != 0)).sum()
    assert moved > 10_000 and near_zero > 10_000


def test_only_parameters_below_float32_have_copies():
    cfg = tiny.PRESETS["deepseek"]
    low = dataclasses.replace(cfg, param_dtype="bfloat16")
    shapes = jf.spec.abstract(jf.model.spec(low), low)
    params = jax.tree.map(lambda p, shape: p.astype(shape.dtype), tiny.drawn(low), shapes)
    assert params["decoder"]["layers"]["moe"]["bias"].dtype == jnp.float32
    transform = optimizer(jf.OptimConfig(schedule="constant", warmup_steps=0), low, 10)
    state = transform.init(params)
    assert isinstance(state, MasterState)
    assert state.master["decoder"]["layers"]["moe"]["bias"] == optax.MaskedNode()
    arrays = jax.tree.leaves(state)
    assert {leaf.dtype for leaf in arrays if leaf.ndim} == {jnp.dtype("float32")}
    assert len(arrays) == 3 * len(jax.tree.leaves(params)) - 1 + 2  # copies and moments; the counts of Adam and the schedule
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 1e-3, p.dtype), params)
    updates, state = jax.jit(transform.update)(grads, state, params)
    after = flatten_dict(optax.apply_updates(params, updates), sep=".")
    for path, leaf in flatten_dict(params, sep=".").items():
        assert after[path].dtype == leaf.dtype
    # the bias has moved by the rate alone: no copy of it brings back what it was
    path = "decoder.layers.moe.bias"
    np.testing.assert_allclose(after[path] - flatten_dict(params, sep=".")[path], -1e-3, rtol=1e-2)


def test_float32_parameters_have_none():
    state = optimizer(jf.OptimConfig(), FULL, 10).init(tiny.drawn(FULL))
    assert not isinstance(state, MasterState)


OPTIM = jf.OptimConfig(lr=3e-4, schedule="constant", warmup_steps=0)
STEPS = 100


def trained(transform, params, rounded=False):
    """Losses before each update, and the last parameters. rounded: gradients and losses are of the parameters as bfloat16 holds
    them."""
    batch = tiny.batch(LOW, rows=8, length=8)
    stored = lambda params: jax.tree.map(lambda p: p.astype(jnp.bfloat16), params) if rounded else params

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(lambda params: jf.loss(params, batch, LOW)[0])(stored(params))
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        updates, state = transform.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    state, values = transform.init(params), []
    for _ in range(STEPS):
        value, params, state = step(params, state)
        values.append(float(value))
    return np.array(values), flatten_dict(params, sep=".")


@pytest.fixture(scope="module")
def runs():
    """Of the same initial parameters, of bfloat16: in float32; by hand, the rounding of float32 parameters; plain AdamW in
    bfloat16; ours."""
    low = jf.init(LOW, jax.random.key(0))
    full = jax.tree.map(lambda p: p.astype(jnp.float32), low)
    plain = from_rule(RULES["adamw"](OPTIM, LOW), OPTIM, LOW, STEPS)
    found = {
        "float32": trained(plain, full),
        "by hand": trained(plain, full, rounded=True),
        "plain": trained(plain, low),
        "ours": trained(optimizer(OPTIM, LOW, STEPS), low),
    }
    return {name: values for name, (values, _) in found.items()}, {name: params for name, (_, params) in found.items()}


def test_bfloat16_trains_as_float32_does(runs):
    """Plain AdamW in bfloat16 loses every update that is below half a unit in the last place."""
    losses, _ = runs
    print({name: (values[0], values[-1]) for name, values in losses.items()})
    assert losses["float32"][0] - losses["float32"][-1] > 2.0
    assert losses["plain"][-1] - losses["float32"][-1] > 0.5
    np.testing.assert_allclose(losses["ours"], losses["float32"], atol=0.05)  # the weights have 8 bits


def test_bfloat16_parameters_are_the_rounding_of_parameters_trained_in_float32(runs):
    losses, params = runs
    np.testing.assert_allclose(losses["ours"], losses["by hand"], rtol=1e-4)
    assert np.abs(losses["ours"] - losses["float32"]).max() > 1e-2
    for path, leaf in params["by hand"].items():
        ours = np.asarray(params["ours"][path], np.float32)
        assert params["ours"][path].dtype == jnp.bfloat16
        # float32's rounding may decide a tie: one unit in the last place in few of them
        np.testing.assert_allclose(ours, leaf.astype(jnp.bfloat16).astype(jnp.float32), rtol=2.0**-7, atol=1e-6, err_msg=path)
        assert (ours == np.asarray(leaf.astype(jnp.bfloat16), np.float32)).mean() > 0.98, path


def test_norms_move_in_bfloat16(runs):
    """A gain at 1 is 0.004 away from the next number."""
    _, params = runs
    gains = [path for path in params["ours"] if path.endswith("gain")]
    assert gains and all((params["plain"][path] == 1.0).all() for path in gains)
    assert all((params["ours"][path] != 1.0).mean() > 0.5 for path in gains)


@pytest.mark.parametrize("wrap", [with_master, lambda inner: with_ema(with_master(inner), 0.5)], ids=["master", "mean"])
def test_what_an_objective_changes_after_an_update_stays_changed(wrap):
    """The copy and the mean are of the parameters that ``after_update`` gives, as with a plain optimizer."""

    def objective(params, batch, rng):
        return (params["w"].astype(jnp.float32) * batch["x"]).sum(), {"weight": jnp.float32(len(batch["x"]))}

    def clipped(params, sums):
        return {"w": params["w"].at[0].set(5.0)} if clipped.on else params

    objective.after_update = clipped
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    batch = {"x": jnp.ones((2, 3))}
    optimizer = wrap(optax.sgd(1.0))
    state = init_state(params, optimizer, jax.random.key(0))
    for clipped.on in (True, False):
        state, _ = jax.jit(make_update(objective, optimizer))(state, batch)
    assert state.params["w"].tolist() == [4.0, -1.0, -1.0]  # a gradient of 1 in each step
    if wrap is not with_master:  # 0 weighs 1/3, the last 2/3
        np.testing.assert_allclose(state.opt_state.ema["w"], [(5 + 2 * 4) / 3, -2 / 3, -2 / 3], rtol=1e-6)


def test_another_optimizer_of_low_parameters_is_warned_of(caplog):
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    init_state(params, optax.sgd(1.0), jax.random.key(0))
    assert "lose small updates" in caplog.text
    caplog.clear()
    init_state(params, with_master(optax.sgd(1.0)), jax.random.key(0))
    init_state({"w": jnp.ones(3)}, optax.sgd(1.0), jax.random.key(0))
    assert not caplog.text
    with pytest.raises(ValueError, match="params must be a nested dict of arrays, as jf.init returns, not ModelConfig"):
        init_state(LOW, optax.sgd(1.0), jax.random.key(0))
