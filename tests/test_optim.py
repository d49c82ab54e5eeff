"""Learning-rate schedules at points worked out by hand, and AdamW against a plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

import jaxformer as jf
from jaxformer.training.optim import learning_rate, optimizer
from tests import tiny

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


# What is refused

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "bad"),
    [("lr", bad) for bad in (0.0, -1e-3, NAN, INFINITY)]
    + [("eps", bad) for bad in (0.0, -1e-8, NAN)]
    + [("warmup_steps", -1), ("clip_norm", -1.0), ("clip_norm", NAN)]
    + [(field, bad) for field in ("final_lr", "weight_decay") for bad in (-0.1, NAN, INFINITY)]
    + [(field, bad) for field in ("beta1", "beta2") for bad in (-0.1, 1.0, NAN)]
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
