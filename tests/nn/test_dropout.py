"""Dropout differs by layer, site, step, row and device, is a function of the key, and is off in evaluation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxformer as jf
from jaxformer.config.components import Component
from jaxformer.parallel.placement import PLACEMENTS
from jaxformer.training.evaluate import make_evaluate
from jaxformer.training.objective import next_token
from tests import tiny
from tests.states import initial, update

pytestmark = pytest.mark.usefixtures("quick_compilation")

SIZES = {"vocab_size": 9, "d_model": 32, "n_heads": 2, "d_ff": 8}
RATE = 0.5

# Blocks whose dropout can be read off: what they add to the residual stream is 1 before dropout, or nothing at all.


def adding(value: float) -> dict[str, Component]:
    """An attention and a feed-forward that give ``value`` everywhere."""

    def spec(cfg):
        return {"unused": jf.bias("D")}

    return {
        "attention": Component(spec, lambda params, x_BTD, cfg, **where: (jnp.full_like(x_BTD, value), None)),
        "mlp": Component(spec, lambda params, x_BTD, cfg: jnp.full_like(x_BTD, value)),
    }


CONSTANT, NOTHING = adding(1.0), adding(0.0)


def outputs(cfg: jf.ModelConfig, params: dict, key, **given) -> dict[str, np.ndarray]:
    """What embedding and blocks give for two equal rows of equal tokens."""
    tokens = np.full((2, 6), 4)
    forward = jf.capture(lambda params, key: jf.forward(params, tokens, cfg, key=key, **given), "*")
    return {name: np.asarray(x) for name, x in jax.jit(forward)(params, key)[1].items()}


def additions(cfg: jf.ModelConfig, params: dict, key) -> np.ndarray:
    """What each layer adds to the residual stream, for two equal rows: [2·L, T, D]."""
    seen = outputs(cfg, params, key)
    stream = [seen["embedding"], *(seen[f"decoder.{layer}.out"] for layer in range(cfg.n_layers))]
    return np.concatenate(np.diff(stream, axis=0))


def all_differ(masks) -> bool:
    return all((a != b).any() for i, a in enumerate(masks) for b in masks[:i])


def test_residual_dropout_differs_by_layer_and_row():
    parts = {"attention": NOTHING["attention"], "mlp": CONSTANT["mlp"], "position": "none"}
    cfg = jf.ModelConfig(**SIZES, n_layers=3, residual_dropout=RATE, **parts)
    params = jf.init(cfg, jax.random.key(0))
    params["embedding"]["token"] = jnp.zeros_like(params["embedding"]["token"])
    added = additions(cfg, params, jax.random.key(1))
    assert set(np.unique(added)) == {0.0, 1 / (1 - RATE)}
    assert all_differ(added)
    assert abs((added == 0).mean() - RATE) < 0.1  # 1152 draws: six standard deviations are 0.09
    assert (additions(cfg, params, None) == 1.0).all()


def test_residual_dropout_differs_by_sublayer():
    """Attention and feed-forward that both add 1 give 0, 1 or 2 of them where each has its own mask."""
    parts = CONSTANT | {"position": "none"}
    cfg = jf.ModelConfig(**SIZES, n_layers=1, residual_dropout=RATE, **parts)
    params = jf.init(cfg, jax.random.key(0))
    params["embedding"]["token"] = jnp.zeros_like(params["embedding"]["token"])
    assert set(np.unique(additions(cfg, params, jax.random.key(1)))) == {0.0, 2.0, 4.0}


def test_attention_dropout_differs_by_layer_and_row():
    """Uniform weights over values of 1, and the same output projection in all layers: only the masks can differ."""
    cfg = jf.ModelConfig(**SIZES, n_layers=3, attention_dropout=RATE, mlp=NOTHING["mlp"], qkv_bias=True)
    params = jf.init(cfg, jax.random.key(0))
    attention = params["decoder"]["layers"]["attention"]
    attention |= {name: jnp.zeros_like(attention[name]) for name in ("query", "key", "value")}
    attention["value_bias"] = jnp.ones_like(attention["value_bias"])
    attention["out"] = jnp.broadcast_to(attention["out"][:1], attention["out"].shape)
    plain = additions(cfg, params, None)
    np.testing.assert_allclose(plain, np.broadcast_to(plain[:1, :1], plain.shape), atol=1e-6)  # differences of sums near 1
    dropped = additions(cfg, params, jax.random.key(1))
    assert all((np.abs(a - b) > 0.01).any() for i, a in enumerate(dropped) for b in dropped[:i])


def test_embedding_dropout_differs_between_encoder_and_decoder():
    fields = {"encoder_layers": 1, "position": "none", "embedding_dropout": RATE, "mlp": NOTHING["mlp"]}
    cfg = jf.ModelConfig(**SIZES, n_layers=1, **fields)
    params, source = jf.init(cfg, jax.random.key(0)), np.full((2, 6), 4)
    for stack, name in (("encoder", "attention"), ("decoder", "attention"), ("decoder", "cross_attention")):
        kernels = params[stack]["layers"][name]
        kernels["out"] = jnp.zeros_like(kernels["out"])
    seen = outputs(cfg, params, jax.random.key(1), source=source)
    assert all_differ([*(seen["encoder.0.out"] == 0), *(seen["decoder.0.out"] == 0)])
    plain = outputs(cfg, params, None, source=source)
    np.testing.assert_array_equal(plain["encoder.0.out"], plain["decoder.0.out"])


@pytest.mark.parametrize("rate", ["attention_dropout", "residual_dropout", "embedding_dropout"])
def test_a_key_decides_and_no_key_is_no_dropout(rate):
    plain = dataclasses.replace(tiny.PRESETS["gpt2"], n_layers=1)
    cfg = dataclasses.replace(plain, **{rate: 0.2})
    params, tokens = tiny.drawn(cfg), tiny.tokens(cfg)
    forward = jax.jit(lambda cfg, key: jf.forward(params, tokens, cfg, key=key), static_argnums=0)
    keys = jax.random.split(jax.random.key(3))
    np.testing.assert_array_equal(forward(cfg, keys[0]), forward(cfg, keys[0]))
    assert (forward(cfg, keys[0]) != forward(cfg, keys[1])).any()
    np.testing.assert_array_equal(forward(cfg, None), forward(plain, None))


# The update. With one token a row, the rows of the embedding's gradient are zero just where dropout fell.

ROWS = 4
TOKENS = np.arange(ROWS, dtype=np.int32)[:, None] + 2
CFG = jf.ModelConfig(**SIZES, n_layers=1, embedding_dropout=RATE, **NOTHING)
OPTIM = jf.OptimConfig(warmup_steps=0, beta1=0.0)  # the first moment is then the gradient


@functools.cache
def placement(kind: str, devices: int, microbatches: int, rate: float):
    cfg = dataclasses.replace(CFG, embedding_dropout=rate)
    return PLACEMENTS[kind](update(cfg, OPTIM, 10, microbatches), jax.devices()[:devices])


def masks(kind: str = "jit", devices: int = 1, microbatches: int = 1, rate: float = RATE, step: int = 0) -> np.ndarray:
    """[rows, D], True where an update numbered ``step`` drops the row's embedding."""
    place = placement(kind, devices, microbatches, rate)
    state = dataclasses.replace(initial(CFG, OPTIM, 10), step=jnp.int32(step))
    batch = {"tokens": TOKENS, "targets": np.full_like(TOKENS, 8), "weights": np.ones(TOKENS.shape, np.float32)}
    state, _ = place.step(place.put_state(state), place.put_batch(batch))
    gradient = optax.tree.get(place.get_state(state).opt_state, "mu")["embedding"]["token"]
    return np.asarray(gradient)[TOKENS[:, 0]] == 0


@pytest.mark.parametrize(
    ("kind", "devices", "microbatches"), [("jit", 1, 1), ("jit", 1, 2), ("jit", 2, 1), ("pmap", 2, 2), ("pmap", 4, 1)]
)
def test_dropout_of_an_update_differs_by_row_device_microbatch_and_step(kind, devices, microbatches):
    first, second = (masks(kind, devices, microbatches, step=step) for step in (0, 1))
    assert all_differ([*first, *second])
    np.testing.assert_array_equal(masks(kind, devices, microbatches, step=1), second)
    assert not masks("jit", 1, 1, rate=0.0).any()


def test_dropout_does_not_depend_on_how_jit_shards_the_rows():
    np.testing.assert_array_equal(masks("jit", 2), masks("jit", 1))


def test_another_seed_drops_otherwise():
    first, second = (initial(CFG, OPTIM, 10, seed) for seed in (0, 1))
    assert (jax.random.key_data(first.rng) != jax.random.key_data(second.rng)).any()


def test_evaluation_has_no_dropout():
    cfg = tiny.with_dropout(CFG, 0.3)
    params, batch = tiny.drawn(CFG), tiny.batch(CFG)
    plain = dataclasses.replace(cfg, attention_dropout=0.0, residual_dropout=0.0, embedding_dropout=0.0)
    found, expected = (jax.jit(make_evaluate(next_token(c)))(params, batch)["nll"] for c in (cfg, plain))
    assert found == expected
    _, metrics = jax.jit(update(cfg, OPTIM, 10))(dataclasses.replace(initial(cfg, OPTIM, 10), params=params), batch)
    assert abs(metrics["loss"] - expected / batch["weights"].sum()) > 1e-3  # training has some
