"""Learning-rate schedules at points worked out by hand, and every optimizer against a plain one or optax's own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec

import jaxformer as jf
from jaxformer.parallel.placement import state_shardings
from jaxformer.parallel.sharding import MeshConfig
from jaxformer.training.ema import ema_params
from jaxformer.training.optim import learning_rate, optimizer
from jaxformer.training.update import TrainState, init_state, param_shardings
from tests import states, tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")

SCHEDULES = ("cosine", "wsd", "inverse_sqrt", "constant")


def rates(updates, steps, **fields) -> np.ndarray:
    """Learning rates of the updates with these numbers (0 is the first) in a run of ``steps``."""
    cfg = jf.OptimConfig(**fields)
    return np.array([learning_rate(cfg, jnp.int32(update), steps) for update in updates])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_is_linear_and_the_first_update_moves(schedule):
    found = rates(range(4), 10, schedule=schedule, lr=0.8, warmup_steps=4)
    np.testing.assert_allclose(found, [0.2, 0.4, 0.6, 0.8], rtol=1e-6)  # float32


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_warm_up_the_first_update_is_near_the_peak(schedule):
    np.testing.assert_allclose(
        rates([0], 1000, schedule=schedule, lr=0.8, warmup_steps=0), [0.8], rtol=1e-5
    )  # cosine: 1/1000 on


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # updates 3, 6, 9 of 10 are steps 4 (end of the warm-up), 7 and 10; 29 is past the end
        ("cosine", {3: 0.8, 6: 0.8 * (0.1 + 0.9 / 2), 9: 0.08, 29: 0.08}),
        # the last half decays: from step 5 to step 10
        ("wsd", {3: 0.8, 4: 0.8, 5: 0.8 * (1 - 0.9 / 5), 7: 0.8 * (1 - 0.9 * 3 / 5), 9: 0.08, 29: 0.08}),
        ("inverse_sqrt", {3: 0.8, 15: 0.4, 63: 0.2}),
        ("constant", {3: 0.8, 6: 0.8, 9: 0.8, 29: 0.8}),
    ],
)
def test_schedule_by_hand(schedule, expected):
    fields = {"lr": 0.8, "warmup_steps": 4, "final_lr": 0.1, "decay_steps": 0.5}
    # 1e-6 for float32; the cosine adds an error of 1e-7 to a factor of 0.1
    np.testing.assert_allclose(rates(expected, 10, schedule=schedule, **fields), list(expected.values()), rtol=2e-6)


def test_wsd_without_decay_stays_until_the_last_update():
    found = rates([7, 8, 9], 10, schedule="wsd", lr=1.0, warmup_steps=0, decay_steps=0.0, final_lr=0.5)
    np.testing.assert_allclose(found, [1.0, 1.0, 0.5], rtol=1e-6)


def test_inverse_sqrt_is_the_2017_schedule():
    """d_model^−0.5 · min(step^−0.5, step · warmup^−1.5) (Vaswani et al. 2017, eq. 3)."""
    d_model, warmup = 512, 4000
    step = np.array([1, 100, 3999, 4000, 4001, 16_000, 100_000])
    expected = d_model**-0.5 * np.minimum(step**-0.5, step * warmup**-1.5)
    found = rates(step - 1, 100_000, schedule="inverse_sqrt", lr=(d_model * warmup) ** -0.5, warmup_steps=warmup)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# AdamW


def plain_adamw(params, grads_by_step, cfg, rate):
    """Loshchilov & Hutter (2019), algorithm 2, in float64, after clipping by the global norm."""
    params = {path: np.asarray(leaf, np.float64) for path, leaf in params.items()}
    m, v = ({path: np.zeros_like(leaf) for path, leaf in params.items()} for _ in range(2))
    for t, grads in enumerate(grads_by_step, 1):
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
        factor = min(1.0, cfg.clip_norm / norm) if cfg.clip_norm else 1.0
        for path, grad in grads.items():
            g = grad * factor
            m[path] = cfg.beta1 * m[path] + (1 - cfg.beta1) * g
            v[path] = cfg.beta2 * v[path] + (1 - cfg.beta2) * g * g
            step = m[path] / (1 - cfg.beta1**t) / (np.sqrt(v[path] / (1 - cfg.beta2**t)) + cfg.eps)
            decay = 0.0 if is_norm_or_bias(path) else cfg.weight_decay
            params[path] = params[path] - rate(t) * (step + decay * params[path])
    return params


def is_norm_or_bias(path: str) -> bool:
    return path.split(".")[-1] == "gain" or path.endswith("bias")


@pytest.mark.parametrize("clip_norm", [0.0, 1.0, 1e6])
def test_three_updates_equal_a_plain_adamw(clip_norm):
    model = jf.ModelConfig(vocab_size=5, d_model=4, n_layers=2, n_heads=2, d_ff=6, qkv_bias=True, mlp_bias=True)
    cfg = jf.OptimConfig(lr=0.1, schedule="constant", warmup_steps=4, weight_decay=0.3, clip_norm=clip_norm, eps=1e-2)
    params = tiny.perturbed(model)
    rng = np.random.default_rng(0)
    grads_by_step = [
        jax.tree.map(lambda leaf: (scale * rng.standard_normal(leaf.shape)).astype(np.float32), params)  # noqa: B023
        for scale in (1.0, 0.01, 0.3)  # norms above and below 1: clipping acts in some steps only
    ]
    norms = [float(optax.global_norm(grads)) for grads in grads_by_step]
    assert norms[1] < 1.0 < norms[2] < norms[0]

    transform = optimizer(cfg, model, 10)
    found, state = params, transform.init(params)
    update = jax.jit(transform.update)
    for grads in grads_by_step:
        updates, state = update(grads, state, found)
        found = optax.apply_updates(found, updates)

    flat, flat_grads = flatten_dict(params, sep="."), [flatten_dict(grads, sep=".") for grads in grads_by_step]
    expected = plain_adamw(flat, flat_grads, cfg, rate=lambda t: 0.1 * t / 4)
    for path, leaf in flatten_dict(found, sep=".").items():
        assert np.abs(leaf - flat[path]).max() > 0.01
        np.testing.assert_allclose(leaf, expected[path], rtol=1e-5, atol=1e-6, err_msg=path)  # float32 against float64


@pytest.mark.parametrize("name", tiny.PRESETS)
def test_decay_is_of_all_but_norms_and_biases(name):
    """With a gradient of zero only decay moves a parameter."""
    model = tiny.PRESETS[name]
    transform = optimizer(jf.OptimConfig(lr=0.5, schedule="constant", warmup_steps=0, weight_decay=0.1), model, 10)

    @jax.jit
    def moved(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optax.apply_updates(params, transform.update(zeros, transform.init(params), params)[0])

    params = jax.tree.map(jnp.ones_like, tiny.drawn(model))
    after = flatten_dict(moved(params), sep=".")
    assert any(map(is_norm_or_bias, after)) and not all(map(is_norm_or_bias, after))
    for path, leaf in after.items():
        # 1 − lr · decay, in float32
        np.testing.assert_allclose(leaf, 1.0 if is_norm_or_bias(path) else 0.95, rtol=1e-6, err_msg=path)


CONSTANT = {"lr": 0.1, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.3}
SMALL = jf.ModelConfig(vocab_size=5, d_model=4, n_layers=2, n_heads=2, d_ff=6, qkv_bias=True, mlp_bias=True)
NAMES = ("adamw", "lion", "adafactor", "sgd", "muon")


def gradients(params, step):
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), params)


def trained(transform, params, steps=3):
    state, update = transform.init(params), jax.jit(transform.update)
    for step in range(steps):
        updates, state = update(gradients(params, step), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def decay_mask(params):
    return unflatten_dict({path: not is_norm_or_bias(path[-1]) for path in flatten_dict(params)})


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_adamw_is_optaxs_own_to_the_bit_and_to_the_state(clip_norm):
    """A checkpoint of one is restored by the other."""
    optim, params = jf.OptimConfig(warmup_steps=2, clip_norm=clip_norm), tiny.drawn(SMALL)
    rate = lambda step: learning_rate(optim, step, 10)
    own = optax.adamw(rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=decay_mask(params))
    own = optax.chain(optax.clip_by_global_norm(clip_norm), own) if clip_norm else own
    expected, found = trained(own, params), trained(optimizer(optim, SMALL, 10), params)
    assert not np.array_equal(expected[0]["embedding"]["token"], params["embedding"]["token"])
    assert_same(found, expected)


@pytest.mark.parametrize("name", ["lion", "sgd"])
def test_lion_and_sgd_are_optaxs_own(name):
    params = tiny.drawn(SMALL)
    mask = decay_mask(params)
    own = {
        "lion": optax.lion(0.1, b1=0.8, b2=0.95, weight_decay=0.3, mask=mask),
        "sgd": optax.chain(optax.trace(0.8), optax.add_decayed_weights(0.3, mask), optax.scale(-0.1)),
    }[name]
    found, _ = trained(optimizer(jf.OptimConfig(name, beta1=0.8, clip_norm=0.0, **CONSTANT), SMALL, 10), params)
    by_adamw, _ = trained(optimizer(jf.OptimConfig(beta1=0.8, clip_norm=0.0, **CONSTANT), SMALL, 10), params)
    expected, _ = trained(own, params)
    for path, leaf in flatten_dict(expected, sep=".").items():
        assert np.abs(flatten_dict(by_adamw, sep=".")[path] - leaf).max() > 1e-2, path
        np.testing.assert_allclose(flatten_dict(found, sep=".")[path], leaf, rtol=1e-5, atol=1e-6, err_msg=path)


def test_adafactor_is_optaxs_own_of_every_matrix():
    """Both sides of most matrices are 128 and more, so that their second moments are factored; gains are of every layer."""
    cfg = jf.presets.llama(vocab_size=130, d_model=128, n_layers=2, n_heads=2, d_ff=130)
    params = tiny.drawn(cfg)
    found, state = trained(optimizer(jf.OptimConfig("adafactor", clip_norm=0.0, **CONSTANT), cfg, 10), params, steps=2)
    own = optax.chain(optax.adafactor(0.1))
    update = jax.jit(own.update)
    for path, leaf in flatten_dict(params, sep=".").items():
        layers = leaf if path.startswith("decoder.layers") else leaf[None]
        name = path.split(".")[-1]

        def matrix(x, name=name):
            return x if x.ndim < 3 else x.reshape(-1, x.shape[-1]) if name == "out" else x.reshape(x.shape[0], -1)

        for layer, first in enumerate(layers):
            x, own_state = jnp.asarray(matrix(first)), own.init(jnp.asarray(matrix(first)))
            decay = 0.0 if is_norm_or_bias(path) else 0.3
            for step in range(2):
                grad = np.asarray(flatten_dict(gradients(params, step), sep=".")[path])
                updates, own_state = update(
                    jnp.asarray(matrix(grad[layer] if path.startswith("decoder.layers") else grad)), own_state, x
                )
                x = x + updates - 0.1 * decay * x
            moved = flatten_dict(found, sep=".")[path]
            moved = matrix(moved[layer] if path.startswith("decoder.layers") else moved)
            np.testing.assert_allclose(moved, x, rtol=1e-5, atol=1e-6, err_msg=path)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) < 0.05 * sum(leaf.size for leaf in jax.tree.leaves(params))


# Optimizers by name


def users(optim, cfg, steps):
    """A user's own: all of the transformation."""
    return optax.sgd(optim.lr * steps + cfg.n_layers)


def no_optimizer(optim, cfg, steps):
    return optim.lr


def test_a_users_optimizer_by_its_import_path():
    params = tiny.drawn(SMALL)
    found, _ = trained(optimizer(jf.OptimConfig("tests.training.test_optim:users", lr=0.5), SMALL, 10), params, steps=1)
    expected = jax.tree.map(lambda p, g: p - 7.0 * g, params, gradients(params, 0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tests.training.test_optim:user", "has no 'user'; did you mean 'users'"),
        ("tests.no_such_module:users", "cannot import 'tests.no_such_module'"),
        ("tests.training.test_optim:NAMES", r"must be a function \(optim, cfg, steps\), not tuple"),
        ("tests.training.test_optim:no_optimizer", "gave float, not an optax.GradientTransformation"),
    ],
)
def test_a_path_that_leads_to_no_optimizer_is_refused(name, message):
    with pytest.raises(ValueError, match=f"optim.name='{name}'.*{message}"):
        optimizer(jf.OptimConfig(name), SMALL, 10)


def test_an_unknown_optimizer_names_the_nearest():
    with pytest.raises(ValueError, match="unknown optim.name 'adam'; did you mean 'adamw'"):
        jf.OptimConfig("adam")


@pytest.mark.parametrize(
    ("name", "field", "value", "users"),
    [
        ("sgd", "beta2", 0.99, "adamw, lion, muon"),
        ("lion", "eps", 1e-6, "adamw, muon"),
        ("adafactor", "beta1", 0.8, "adamw, lion, sgd, muon"),
        ("adamw", "muon_beta", 0.9, "muon"),
        ("adamw", "muon_rms", 0.0, "muon"),
        ("muon", "mup_base", 64, "adamw, lion"),
        ("tests.training.test_optim:users", "mup_base", 64, "adamw, lion"),
    ],
)
def test_a_field_without_effect_is_refused(name, field, value, users):
    with pytest.raises(
        ValueError, match=f"optim.{field}={value} has no effect with optim.name='{name}'; it is used by {users}$"
    ):
        jf.OptimConfig(name, **{field: value})


@pytest.mark.parametrize("name", NAMES)
def test_decay_clipping_and_schedule_are_everyones(name):
    """With a gradient of zero only decay moves a parameter, by the schedule's rate; a long gradient's length is nothing."""
    optim = jf.OptimConfig(name, lr=0.5, schedule="constant", warmup_steps=2, weight_decay=0.1)
    transform, params = optimizer(optim, SMALL, 10), jax.tree.map(jnp.ones_like, tiny.drawn(SMALL))
    update = jax.jit(transform.update)
    updates, _ = update(jax.tree.map(jnp.zeros_like, params), transform.init(params), params)
    for path, leaf in flatten_dict(updates, sep=".").items():
        np.testing.assert_allclose(leaf, 0.0 if is_norm_or_bias(path) else -0.025, rtol=1e-6, err_msg=path)
    grads = gradients(params, 0)
    first, twice = (update(jax.tree.map(lambda g: f * g, grads), transform.init(params), params)[0] for f in (1, 2))  # noqa: B023
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), first, twice)


# States on a mesh


@pytest.mark.parametrize("name", NAMES)
def test_states_lie_where_their_parameters_do(name):
    cfg = dataclasses.replace(tiny.PRESETS["deepseek"], param_dtype="bfloat16")
    transform = optimizer(jf.OptimConfig(name, ema=0.9), cfg, 10)
    params = jf.spec.abstract(jf.model.spec(cfg), cfg)
    state = jax.eval_shape(lambda params: init_state(params, transform, jax.random.key(0)), params)
    where = state_shardings(state, param_shardings(cfg, MeshConfig(fsdp=4, expert=2).make()))
    assert jax.tree.structure(where.opt_state) == jax.tree.structure(state.opt_state)
    query = where.params["decoder"]["layers"]["attention"]["query"]
    assert query.spec != PartitionSpec()
    assert where.opt_state.ema["decoder"]["layers"]["attention"]["query"] == query
    assert where.opt_state.inner.master["decoder"]["layers"]["attention"]["query"] == query
    shared = [at for at in jax.tree.leaves(where.opt_state.inner.inner) if at == query]
    assert len(shared) >= {"adamw": 2, "lion": 1, "adafactor": 0, "sgd": 1, "muon": 1}[name]


@pytest.mark.parametrize("name", NAMES)
def test_states_are_saved_and_restored(name, tmp_path):
    cfg = dataclasses.replace(states.CFG, param_dtype="bfloat16")
    optim = jf.OptimConfig(name, ema=0.9, warmup_steps=2)
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), tiny.drawn(cfg))
    params, opt_state = trained(optimizer(optim, cfg, states.STEPS), params, steps=1)
    state = TrainState(jnp.int32(1), params, opt_state, jax.random.key(5))
    states.save(tmp_path, state)
    restored = states.restore(tmp_path, states.like(cfg, optim))
    states.assert_equal(restored, state)
    assert_same(ema_params(restored.opt_state, restored.params), ema_params(opt_state, params))


# What is refused

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "bad"),
    [("lr", bad) for bad in (0.0, -1e-3, NAN, INFINITY)]
    + [("eps", bad) for bad in (0.0, -1e-8, NAN)]
    + [("warmup_steps", -1), ("clip_norm", -1.0), ("clip_norm", NAN)]
    + [(field, bad) for field in ("final_lr", "weight_decay") for bad in (-0.1, NAN, INFINITY)]
    + [(field, bad) for field in ("beta1", "beta2", "muon_beta", "ema") for bad in (-0.1, 1.0, NAN)]
    + [("muon_rms", -0.1), ("muon_rms", NAN), ("mup_base", 0), ("mup_base", 8.0)]
    + [("decay_steps", bad) for bad in (-0.1, NAN)],
)
def test_a_bad_value_raises(field, bad):
    with pytest.raises(ValueError, match=field):
        jf.OptimConfig(**{field: bad})


def test_an_unknown_schedule_names_the_nearest():
    with pytest.raises(ValueError, match="'cosin'; did you mean 'cosine'"):
        jf.OptimConfig(schedule="cosin")


def test_an_unknown_field_names_the_nearest():
    with pytest.raises(ValueError, match="'warmup'; did you mean 'warmup_steps'"):
        jf.OptimConfig(warmup=10)
