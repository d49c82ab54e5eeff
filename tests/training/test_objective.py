"""Objectives of a user's own: any function, any batch entries, the same numbers on any devices; what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxformer as jf
from jaxformer.parallel.placement import batch_shardings, check_batch
from jaxformer.parallel.sharding import MeshConfig
from jaxformer.training import init_state, make_update
from tests import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")
CFG = jf.presets.llama(vocab_size=24, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1)
ROWS, LENGTH, STEPS = 8, 6, 3
# As in test_step: an epsilon near the gradients' size, so that Adam sees their scale.
OPTIM = jf.OptimConfig(lr=0.03, schedule="constant", warmup_steps=0, eps=1e-2)


def preferences(cfg, frozen, beta=0.5):
    """Direct preference optimisation (Rafailov et al. 2023, eq. 7), against the model of ``frozen``."""

    def logprob(params, tokens, weights):
        logits = jax.nn.log_softmax(jf.forward(params, tokens[:, :-1], cfg))
        return (jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0] * weights).sum(-1)

    def objective(params, batch, rng):
        margins = 0.0
        for side, sign in (("chosen", 1), ("rejected", -1)):
            given = batch[side], batch["counted"]
            margins += sign * beta * (logprob(params, *given) - jax.lax.stop_gradient(logprob(frozen, *given)))
        nll = -jax.nn.log_sigmoid(margins) * batch["trust"]
        return nll.sum(), {"weight": batch["trust"].sum(), "accuracy": ((margins > 0) * batch["trust"]).sum()}

    return objective


def batches(steps=STEPS):
    """Pairs of rows of tokens, whose rows weigh differently; their length does not divide by 4."""
    for seed in range(steps):
        rng = np.random.default_rng(seed)
        chosen, rejected = (rng.integers(0, CFG.vocab_size, (ROWS, LENGTH + 1)).astype(np.int32) for _ in range(2))
        counted = (np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (ROWS, 1))).astype(np.float32)
        trust = rng.uniform(0.1, 2.0, ROWS).astype(np.float32)
        yield {"chosen": chosen, "rejected": rejected, "counted": counted, "trust": trust}


def fresh(optimizer, params):
    return jf.training.init_state(params, optimizer, jax.random.key(0))


def place(kind, devices, update, optimizer):
    if kind != "mesh":
        return getattr(jf.training, kind)(update, jax.devices()[:devices])
    mesh = MeshConfig(fsdp=2, tensor=2, context=2).make()
    abstract = jax.eval_shape(functools.partial(fresh, optimizer), tiny.drawn(CFG))
    return jf.training.mesh(update, abstract, jf.training.param_shardings(CFG, mesh), letters={"counted": "BT"})


@functools.cache
def trained(kind, devices, microbatches=1):
    """The parameters before and after, and the metrics by step."""
    optimizer = jf.training.optimizer(OPTIM, CFG, STEPS)
    update = jf.training.make_update(preferences(CFG, tiny.drawn(CFG, seed=5)), optimizer, microbatches=microbatches)
    placement = place(kind, devices, update, optimizer)
    state, metrics = placement.begin(functools.partial(fresh, optimizer), tiny.drawn(CFG)), []
    before = jax.device_get(placement.get_state(state).params)
    for batch in batches():
        state, step_metrics = placement.step(state, placement.put_batch(batch))
        metrics.append(placement.get_metrics(step_metrics))
    return before, jax.device_get(placement.get_state(state).params), metrics


@pytest.mark.parametrize(
    ("kind", "devices", "microbatches"),
    [("jit", 1, 2), ("jit", 4, 1), ("pmap", 4, 1), ("mesh", 8, 1), ("pmap", 2, 2), ("mesh", 8, 2)],
)
def test_two_forwards_of_which_one_is_frozen_train_the_same_everywhere(kind, devices, microbatches):
    before, expected, expected_metrics = trained("jit", 1)
    moved = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (before, expected)), strict=True)]
    assert np.median(moved) > 1e-3
    _, found, metrics = trained(kind, devices, microbatches)
    for a, b in zip(metrics, expected_metrics, strict=True):
        assert a == pytest.approx(b, rel=1e-4)  # float32 sums in another order, over up to three updates
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), found, expected)


def test_a_mean_of_the_parts_means_would_differ():
    """Without this the test of equal training could not fail."""
    batch, objective = next(batches()), preferences(CFG, tiny.drawn(CFG, seed=5))
    halves = [{name: x[half::2] for name, x in batch.items()} for half in (0, 1)]
    total, sums = objective(tiny.drawn(CFG), batch, None)
    means = [total / sums["weight"] for total, sums in (objective(tiny.drawn(CFG), half, None) for half in halves)]
    assert abs(np.mean(means) - total / sums["weight"]) > 0.01


def test_metrics_are_means_over_the_weight():
    optimizer, batch = optax.sgd(0.1), next(batches())
    objective = preferences(CFG, tiny.drawn(CFG, seed=5))
    _, metrics = jax.jit(jf.training.make_update(objective, optimizer))(fresh(optimizer, tiny.drawn(CFG)), batch)
    assert metrics.keys() == {"loss", "accuracy", "weight", "grad_norm", "nonfinite"}  # this optimizer tells no learning rate
    total, sums = objective(tiny.drawn(CFG), batch, None)
    assert float(metrics["weight"]) == pytest.approx(batch["trust"].sum(), rel=1e-6)
    assert float(metrics["loss"]) == pytest.approx(float(total / sums["weight"]), rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx(float(sums["accuracy"] / sums["weight"]), rel=1e-6)


def linear(params, batch, rng):
    """Half the squared error: a regression whose gradient can be written down."""
    error = batch["x"] @ params["w"] - batch["y"]
    return 0.5 * (error**2).sum(), {"weight": jnp.float32(len(error)), "loss": jnp.abs(error).sum()}


def test_any_model_and_optimizer_by_hand():
    """One step of gradient descent with momentum, on a model that is none of the library's."""
    rng = np.random.default_rng(0)
    x, y, w = rng.standard_normal((4, 3)), rng.standard_normal(4), rng.standard_normal(3)
    optimizer = optax.sgd(0.5, momentum=0.9)
    state = jf.training.init_state({"w": jnp.float32(w)}, optimizer, jax.random.key(0))
    state, metrics = jf.training.make_update(linear, optimizer, microbatches=2)(
        state, {"x": jnp.float32(x), "y": jnp.float32(y)}
    )
    gradient = x.T @ (x @ w - y) / 4
    np.testing.assert_allclose(state.params["w"], w - 0.5 * gradient, rtol=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
    assert float(metrics["loss"]) == pytest.approx(np.abs(x @ w - y).mean(), rel=1e-5), "the loss that it reports itself"
    assert int(state.step) == 1


class Counting:
    """An objective with attributes: validation by another measure, and a parameter that counts updates."""

    def __call__(self, params, batch, rng):
        return linear(params, batch, rng)

    def after_update(self, params, sums):
        return params | {"seen": params["seen"] + sums["weight"]}

    def metrics(self, sums):
        return {"loss": sums["loss"], "weight": sums["weight"], "twice": 2 * sums["weight"]}

    @staticmethod
    def validation(params, batch, rng):
        return jnp.float32(7.0), {"weight": jnp.float32(2.0)}


def test_what_an_objective_may_have_besides():
    optimizer, batch = optax.sgd(0.1), {"x": jnp.ones((4, 3)), "y": jnp.zeros(4)}
    state = jf.training.init_state({"w": jnp.ones(3), "seen": jnp.float32(0)}, optimizer, jax.random.key(0))
    state, metrics = jf.training.make_update(Counting(), optimizer)(state, batch)
    assert float(state.params["seen"]) == 4.0 and float(metrics["twice"]) == 8.0
    sums = jf.training.make_evaluate(Counting())(state.params, batch)
    assert {name: float(value) for name, value in sums.items()} == {"loss": 7.0, "weight": 2.0}


def test_a_key_for_every_call_and_none_in_validation():
    """The masks of two microbatches differ, and those of two steps."""
    optimizer, seen = optax.sgd(0.0), []

    def noisy(params, batch, rng):
        seen.append(rng is None)
        noise = 0.0 if rng is None else jax.random.normal(rng, batch["x"].shape)
        sums = {"weight": jnp.float32(1.0), "draws": jnp.where(batch["x"] == 0, noise, 0.0).sum()}
        return params["w"] * batch["x"].sum(), sums

    state = jf.training.init_state({"w": jnp.float32(1.0)}, optimizer, jax.random.key(0))
    update = jf.training.make_update(noisy, optimizer, microbatches=2)
    halves = [jnp.array([[0.0], [1.0]]), jnp.array([[1.0], [0.0]])]
    first, second = (float(update(state, {"x": half})[1]["draws"]) for half in halves)
    later = dataclasses.replace(state, step=jnp.int32(1))
    assert len({first, second, float(update(later, {"x": halves[0]})[1]["draws"])}) == 3
    jf.training.make_evaluate(noisy)(state.params, {"x": halves[0]})
    assert seen[-1] and not any(seen[:-1])


# Batches on a mesh


def test_entries_are_spread_by_their_letters():
    mesh = MeshConfig(data=2, context=4).make()
    shapes = {"tokens": (8, 12), "source": (8, 12), "image": (8, 12, 4), "score": (8,), "frames": (8, 12, 4)}
    batch = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    found = {name: at.spec for name, at in batch_shardings(batch, mesh, {"frames": "BT"}).items()}
    assert found == {
        "tokens": PartitionSpec("data", "context"),
        "source": PartitionSpec("data", None),
        "image": PartitionSpec("data", None, None),
        "score": PartitionSpec("data"),
        "frames": PartitionSpec("data", "context", None),
    }
    check_batch(batch, mesh)
    short = batch | {"image": jax.ShapeDtypeStruct((8, 7, 4), np.float32)}
    check_batch(short, mesh)
    with pytest.raises(ValueError, match="length=7 is not divisible by 4 devices along context"):
        check_batch(short, mesh, letters={"image": "BT"})


def test_a_tensor_of_the_optimizer_lies_where_its_parameter_does():
    """Any optax transformation: what has a parameter's shape, at its path, is spread; factored moments are not."""
    cfg, mesh = tiny.PRESETS["llama_gqa"], MeshConfig(fsdp=8).make()
    optimizer = optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=8), optax.trace(0.9), optax.ema(0.9))
    state = jax.eval_shape(lambda: jf.training.init_state(jf.init(cfg, jax.random.key(0)), optimizer, jax.random.key(1)))
    placement = jf.training.mesh(lambda state, batch: (state, {}), state, jf.training.param_shardings(cfg, mesh))
    factored, momentum, mean = placement.like(state).opt_state
    where = jf.training.param_shardings(cfg, mesh)
    for tree in (momentum.trace, mean.ema):
        assert jax.tree.map(lambda x: x.sharding, tree) == where
    assert not where["embedding"]["token"].is_fully_replicated
    assert factored.v_row["embedding"]["token"].sharding.is_fully_replicated


# What is refused


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda: 1.0, r"must return \(total, sums\), a scalar and a dict, not float"),
        (lambda: (1.0, {}), r'with a scalar sums\["weight"\], which is missing'),
        (lambda: (jnp.ones(2), {"weight": 1.0}), r"with a scalar total, which has shape \(2,\)"),
        (lambda: (1.0, {"weight": jnp.ones((2, 1))}), r'scalar sums\["weight"\], which has shape \(2, 1\)'),
    ],
)
def test_an_objective_that_returns_something_else(result, message):
    optimizer = optax.sgd(0.1)
    state = jf.training.init_state({"w": jnp.ones(3)}, optimizer, jax.random.key(0))
    with pytest.raises(ValueError, match=message):
        jf.training.make_update(lambda params, batch, rng: result(), optimizer)(state, {"x": jnp.ones((4, 3))})


@pytest.mark.parametrize(
    ("batch", "shown"),
    [({"a": np.ones((4, 2)), "b": np.ones(3)}, "a: 4, b: 3"), ({"a": np.float32(1)}, "a: no axis"), ({}, "empty")],
)
def test_a_batch_without_rows(batch, shown):
    placement = jf.training.jit(lambda state, batch: (state, {}))
    with pytest.raises(
        ValueError, match=f"the first axis of every batch entry must be the rows, of the same number; it is {shown}"
    ):
        placement.put_batch(batch)


def test_metrics_of_its_own_have_a_loss_and_get_the_weight():
    def objective(params, batch, rng):
        return (params["w"] * batch["x"]).sum(), {"weight": jnp.float32(4)}

    optimizer = optax.sgd(0.1)
    state = init_state({"w": jnp.ones(())}, optimizer, jax.random.key(0))
    batch = {"x": jnp.ones((4, 1))}
    objective.metrics = lambda sums: {"loss": sums["loss"] / 8}
    _, metrics = make_update(objective, optimizer)(state, batch)
    assert (float(metrics["loss"]), float(metrics["weight"])) == (0.5, 4.0)
    objective.metrics = lambda sums: {"score": sums["loss"]}
    with pytest.raises(ValueError, match="must include 'loss'; it has weight, score"):
        make_update(objective, optimizer)(state, batch)


def test_embeddings_do_not_go_with_the_block_for_the_token_after_the_next():
    cfg = jf.presets.llama(vocab_size=16, d_model=8, n_layers=1, n_heads=2, mtp=True)
    batch = tiny.batch(cfg) | {"embeddings": np.zeros((4, 8, 8), np.float32), "embeddings_mask": np.zeros((4, 8), bool)}
    with pytest.raises(ValueError, match="a batch with embeddings cannot be used with mtp"):
        jf.loss(tiny.drawn(cfg), batch, cfg)


def test_an_update_names_a_missing_entry():
    cfg = jf.presets.llama(vocab_size=16, d_model=8, n_layers=1, n_heads=2)
    optimizer = optax.sgd(0.1)
    state = init_state(tiny.drawn(cfg), optimizer, jax.random.key(0))
    with pytest.raises(ValueError, match="batch lacks weights; it has tokens, targets"):
        make_update(jf.training.next_token(cfg), optimizer)(state, {n: tiny.batch(cfg)[n] for n in ("tokens", "targets")})
