"""The losses and the bias that keep experts in use: worked numbers, and the same on microbatches and devices."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxformer as jf
from jaxformer.config import Experts
from jaxformer.nn.experts import router
from jaxformer.parallel.placement import AXIS
from jaxformer.training import balance
from jaxformer.training.objective import NextToken
from tests.states import initial, update

pytestmark = pytest.mark.usefixtures("quick_compilation")
BASE = Experts(n_experts=4, per_token=2, d_ff=8)


def did(*layers, experts=BASE, counted=None):
    """What layers with these logits [T, E] do."""
    sums = []
    for logits in layers:
        logits = jnp.asarray(logits, jnp.float32)
        routing = router.route({"router": jnp.eye(experts.n_experts)}, logits[None], experts)
        counts = jnp.ones(len(logits), bool) if counted is None else jnp.asarray(counted)
        sums.append(router.sums(routing, jnp.ones(routing.expert.shape, bool), counts[None], experts))
    return {name: jnp.stack([one[name] for one in sums]) for name in sums[0]}


WORKED = [[2, 1, 0, -1], [2, 1, 0, -1], [0, 2, 1, -1]]


def test_worked_numbers():
    np.testing.assert_allclose(balance.balance(did(WORKED)), 1.447590, atol=5e-7)  # as many digits as are given
    one = dataclasses.replace(BASE, per_token=1)
    even = np.eye(4) * 50  # every expert gets a quarter, with certainty
    np.testing.assert_allclose(balance.balance(did(even, experts=one)), 1.0, atol=1e-6)
    first, second = np.tile([60, 60, 0, 0], (6, 1)), np.tile([0, 0, 60, 60], (6, 1))
    found = balance.balance(did(first, second))
    np.testing.assert_allclose(found, [2.0, 2.0], atol=1e-6)
    together = did(np.concatenate([first, second]))
    np.testing.assert_allclose(balance.balance(together), 1.0, atol=1e-6), "layers taken together would hide it"


def test_padding_changes_nothing():
    padded = [*WORKED, [50, 0, 0, 0]]
    assert abs(float(balance.balance(did(padded))[0]) - 1.447590) > 0.05
    counted = did(padded, counted=[True, True, True, False])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), counted, did(WORKED))


def test_z_loss_and_metrics_by_hand():
    squares = [math.log(sum(math.exp(x) for x in row)) ** 2 for row in WORKED]
    found = balance.penalty(did(WORKED), jf.Execution(balance_loss=0.5, router_z_loss=0.25))
    np.testing.assert_allclose(found, 0.5 * 1.447590 + 0.25 * sum(squares) / 3, rtol=1e-6)
    metrics = {name: float(value) for name, value in balance.metrics(did(WORKED)).items()}
    share = np.array([2, 3, 1]) / 6
    expected = {"load_max": 2.0, "load_min": 0.0, "dropped": 0.0, "load_entropy": -(share * np.log(share)).sum() / math.log(4)}
    assert metrics == pytest.approx(expected | {"balance": 1.447590}, abs=1e-6)


def test_the_bias_follows_the_load():
    params = {"decoder": {"layers": {"moe": {"bias": jnp.zeros((2, 4)), "up": jnp.ones(1)}}, "norm": 1}, "head": 2}
    moved = balance.move_bias(params, jnp.array([[4.0, 2, 1, 1], [2, 2, 2, 2]]), 0.1)
    np.testing.assert_allclose(moved["decoder"]["layers"]["moe"]["bias"], [[-0.1, 0, 0.1, 0.1], [0, 0, 0, 0]], atol=1e-7)
    assert jax.tree.structure(moved) == jax.tree.structure(params)


# In training


SIGMOID = dataclasses.replace(BASE, score="sigmoid", selection_bias=True)
PENALTIES = {"balance_rate": 0.01, "balance_loss": 0.1, "router_z_loss": 0.01}
CFG = jf.presets.llama(vocab_size=40, d_model=16, n_layers=2, n_heads=2, max_length=32, experts=SIGMOID, **PENALTIES)
MIXED = dataclasses.replace(CFG, experts=dataclasses.replace(SIGMOID, layers=(1,)))
OPTIM = jf.OptimConfig(lr=1e-3, warmup_steps=0)


def batch(rows=8):
    tokens = tiny.tokens(CFG, batch=rows, length=9)
    weights = np.ones((rows, 8), np.float32)
    weights[0, 5:] = 0
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def test_the_loss_has_the_penalty_on_top():
    params = tiny.drawn(MIXED)
    without = dataclasses.replace(MIXED, balance_loss=0.0, router_z_loss=0.0)
    (full, metrics), (plain, _) = (jax.jit(jf.loss, static_argnums=2)(params, batch(), cfg) for cfg in (MIXED, without))
    sums = NextToken(MIXED)(params, batch())[1]
    assert sums["load"].shape == (1, 4) and float(sums["tokens"][0]) == 8 * 8 - 3, (
        "one layer of two; what is not trained does not count"
    )
    extra = 0.1 * float(metrics["balance"]) + 0.01 * float((sums["log_z2"] / sums["tokens"]).mean())
    assert extra > 0.05
    np.testing.assert_allclose(full - plain, extra, rtol=1e-4)
    chunked, _ = jf.loss(params, batch(), MIXED, chunk=3)
    np.testing.assert_allclose(chunked, full, rtol=1e-6)


def test_an_update_moves_the_bias_by_the_rate_alone():
    state = initial(MIXED, OPTIM, 10)
    after, metrics = jax.jit(update(MIXED, OPTIM, 10))(state, batch())
    bias = np.asarray(after.params["decoder"]["layers"]["moe"]["bias"])
    load = np.asarray(NextToken(MIXED)(state.params, batch())[1]["load"])
    np.testing.assert_allclose(bias, 0.01 * np.sign(load.mean(-1, keepdims=True) - load), atol=1e-7)
    assert bias.any() and {"balance", "load_max", "load_min", "load_entropy", "dropped"} <= metrics.keys()


def test_devices_agree():
    """pmap balances the load of the whole step: the update is one device's. (A sharded jit: test_mesh.)"""
    data = batch()
    state = initial(MIXED, OPTIM, 10)
    alone, metrics = jax.jit(update(MIXED, OPTIM, 10))(state, data)
    spread = jax.pmap(update(MIXED, OPTIM, 10), axis_name=AXIS)
    rows = jax.tree.map(lambda x: x.reshape(8, 1, *x.shape[1:]), data)
    copies = jax.tree.map(lambda x: jnp.stack([x] * 8), state)
    many, their_metrics = spread(copies, rows)
    loads = [NextToken(MIXED)(state.params, {name: x[i] for name, x in rows.items()})[1]["load"] for i in range(2)]
    assert np.abs(loads[0] - loads[1]).max() > 0, "the devices' loads differ"
    assert float(their_metrics["balance"][0]) == pytest.approx(float(metrics["balance"]), rel=1e-5)
    # Float32 sums in another order, through Adam's first step, whose size does not depend on the gradient's.
    gap = jax.tree.map(lambda a, b: np.abs(a - b[0]).max(), alone.params, many.params)
    assert max(jax.tree.leaves(gap)) < 2e-5
    np.testing.assert_array_equal(
        alone.params["decoder"]["layers"]["moe"]["bias"], many.params["decoder"]["layers"]["moe"]["bias"][0]
    )


def test_microbatches_balance_what_they_have():
    """Each has the loss of its own load, by its share of the tokens; everything else is that of the whole batch."""
    linear = dataclasses.replace(MIXED, balance_loss=0.0)
    data, state = batch(), initial(linear, OPTIM, 10)
    whole, parts = (jax.jit(update(linear, OPTIM, 10, microbatches=n))(state, data) for n in (1, 4))
    gap = jax.tree.map(lambda a, b: np.abs(a - b).max(), whole[0].params, parts[0].params)
    assert max(jax.tree.leaves(gap)) < 2e-5
    assert float(whole[1]["balance"]) == pytest.approx(float(parts[1]["balance"]), rel=1e-5)
