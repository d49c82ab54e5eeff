"""One training update: the same numbers for any number of microbatches and devices, by jit and by pmap."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import jaxformer as jf
from jaxformer.config import spec as specs
from jaxformer.parallel.placement import PLACEMENTS
from jaxformer.training.optim import learning_rate, optimizer
from jaxformer.training.update import TrainState, init_state
from tests import tiny
from tests.states import update

pytestmark = pytest.mark.usefixtures("quick_compilation")

STEPS, ROWS = 3, 8
# An epsilon near the gradients' size: Adam is then smooth in them and sees their scale. With the usual 1e-8 the first update is
# lr · sign(gradient), which hides a wrong scale and turns the rounding of a gradient that is nearly zero into a full step.
OPTIM = jf.OptimConfig(lr=0.03, schedule="constant", warmup_steps=2, eps=1e-2, clip_norm=0.5)


SIZES = {"vocab_size": 67, "d_model": 16, "n_layers": 1, "n_heads": 2, "norm": "rms", "tied_head": True}
MODELS = {
    "decoder": jf.presets.llama(**SIZES, n_kv_heads=1),
    "encoder_decoder": jf.ModelConfig(**SIZES, encoder_layers=1, mlp="relu", residual="post", position="sinusoidal"),
}


def state_of(cfg: jf.ModelConfig, optim: jf.OptimConfig) -> TrainState:
    return init_state(tiny.drawn(cfg), optimizer(optim, cfg, STEPS), jax.random.key(0))


def fresh(model: str) -> TrainState:
    return state_of(MODELS[model], OPTIM)


def batches(model: str) -> list[dict]:
    """Three batches; each row of one has its own number of counted tokens, rows 2 and 3 none."""
    made = [tiny.batch(MODELS[model], ROWS, seed=seed) for seed in range(STEPS)]
    for batch in made:
        batch["weights"][2:4] = 0.0
    return made


@functools.cache
def placement(model: str, kind: str, devices: int, microbatches: int = 1):
    return PLACEMENTS[kind](update(MODELS[model], OPTIM, STEPS, microbatches), jax.devices()[:devices])


@functools.cache
def trained(model: str, kind: str, devices: int, microbatches: int = 1):
    """``({path: array of the state}, metrics by step)`` after three updates."""
    place = placement(model, kind, devices, microbatches)
    state, metrics = place.put_state(fresh(model)), []
    for batch in batches(model):
        state, step_metrics = place.step(state, place.put_batch(batch))
        metrics.append(place.get_metrics(step_metrics))
    state = place.get_state(state)
    leaves = jax.tree_util.tree_flatten_with_path((state.params, state.opt_state))[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}, metrics


def assert_same_training(found, expected):
    # Sums over at most 64 positions in another order: relative errors of some 1e-6 a step, and entries that nearly cancel.
    for path, leaf in expected[0].items():
        np.testing.assert_allclose(found[0][path], leaf, rtol=1e-4, atol=2e-6, err_msg=path)
    for a, b in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose([a[name] for name in b], list(b.values()), rtol=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_a_mean_of_the_parts_means_would_differ(model):
    """Without this the tests of equal training could not fail."""
    batch = batches(model)[0]
    rows = jax.tree.map(lambda x: x[:, None], batch)
    gradient = jax.grad(lambda params, row: jf.loss(params, row, MODELS[model])[0])
    means = jax.jit(jax.vmap(gradient, (None, 0)))(fresh(model).params, rows)["embedding"]["token"]
    counts = batch["weights"].sum(1)
    sums = np.asarray(means) * counts[:, None, None]
    exact = sums.sum(0) / counts.sum()
    for parts in (2, 4, 8):
        sums_by_part, counts_by_part = (x.reshape(parts, -1, *x.shape[1:]).sum(1) for x in (sums, counts))
        naive = (sums_by_part / np.maximum(counts_by_part, 1)[:, None, None]).mean(0)
        assert np.abs(exact - naive).max() > 0.05 * np.abs(exact).max()


@pytest.mark.parametrize(("model", "microbatches"), [("decoder", 2), ("decoder", 4), ("encoder_decoder", 2)])
def test_microbatches_train_the_same(model, microbatches):
    assert_same_training(trained(model, "jit", 1, microbatches), trained(model, "jit", 1))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_devices_train_the_same(model, kind, devices):
    assert_same_training(trained(model, kind, devices), trained(model, "jit", 1))


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_microbatches_on_devices_train_the_same(kind):
    assert_same_training(trained("decoder", kind, 2, 2), trained("decoder", "jit", 1))


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_each_device_computes_its_own_part_of_every_microbatch(kind, microbatches):
    """Seen in the logits of the compiled program: [rows, T, V] of one device, one microbatch at a time."""
    place = placement("decoder", kind, 2, microbatches)
    step = place.step if hasattr(place.step, "lower") else place.step.__wrapped__
    with place.within():
        program = step.lower(place.put_state(fresh("decoder")), place.put_batch(batches("decoder")[0])).compile().as_text()
    rows = [int(n) for n in re.findall(r"f32\[(\d+),8,67\]", program)]
    assert max(rows) == ROWS // 2 // microbatches


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_every_device_holds_the_same_state(kind):
    place = placement("decoder", kind, 4)
    state = place.put_state(fresh("decoder"))
    state, _ = place.step(state, place.put_batch(batches("decoder")[0]))
    for leaf in jax.tree.leaves(state.params):
        copies = [np.asarray(shard.data).reshape(-1) for shard in leaf.addressable_shards]
        assert len(copies) == 4
        assert all((copy == copies[0]).all() for copy in copies)


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_the_state_is_updated_in_place(kind):
    place = placement("decoder", kind, 2)
    state = place.put_state(fresh("decoder"))
    state, _ = place.step(state, place.put_batch(batches("decoder")[0]))  # now where the update puts it
    place.step(state, place.put_batch(batches("decoder")[1]))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt_state)))


def test_metrics():
    cfg = MODELS["decoder"]
    batch, params = batches("decoder")[0], fresh("decoder").params
    (loss, expected), grads = jax.jit(jax.value_and_grad(lambda p: jf.loss(p, batch, cfg), has_aux=True))(params)
    norm = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in jax.tree.leaves(grads)))
    assert norm > OPTIM.clip_norm  # what is reported is the norm before clipping
    found = trained("decoder", "jit", 1)[1]
    # 1e-5: float32 sums, compiled in another program
    expected = expected | {"loss": loss, "grad_norm": norm, "lr": OPTIM.lr / 2, "nonfinite": 0}
    assert found[0] == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-5)
    assert found[0]["weight"] == batch["weights"].sum()
    rates = [float(learning_rate(OPTIM, jnp.int32(step), STEPS)) for step in range(STEPS)]
    assert [metrics["lr"] for metrics in found] == pytest.approx(rates, rel=1e-6)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_with_nothing_to_learn(microbatches):
    place = placement("decoder", "jit", 1, microbatches)
    batch = batches("decoder")[0]
    batch["weights"][:] = 0.0
    state = place.put_state(fresh("decoder"))
    state, metrics = place.step(state, place.put_batch(batch))
    assert int(state.step) == 1
    assert metrics["loss"] == metrics["grad_norm"] == metrics["weight"] == 0.0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_rows_that_do_not_divide_by_the_devices_raise(kind):
    with pytest.raises(ValueError, match="batch_size=6 is not divisible by 4 devices; the nearest is 8"):
        placement("decoder", kind, 4).put_batch(tiny.batch(MODELS["decoder"], 6))


def test_rows_that_do_not_divide_into_microbatches_raise():
    step = update(MODELS["decoder"], OPTIM, STEPS, microbatches=3)
    with pytest.raises(ValueError, match="8 rows cannot be split into 3 equal microbatches"):
        jax.eval_shape(step, fresh("decoder"), batches("decoder")[0])


# A tied head


def shallow(name: str) -> jf.ModelConfig:
    cfg = tiny.PRESETS[name]
    return dataclasses.replace(cfg, n_layers=1, encoder_layers=min(1, cfg.encoder_layers))


@pytest.mark.parametrize("name", ["gpt2", "transformer_base"])
def test_a_tied_embedding_is_one_array_that_learns_from_both_uses(name):
    tied = shallow(name)
    untied = dataclasses.replace(tied, tied_head=False)
    params, batch = tiny.drawn(tied), tiny.batch(tied)
    embedding = params["embedding"]["token"]
    assert "head" not in params
    moments = [leaf for leaf in jax.tree.leaves(optimizer(OPTIM, tied, STEPS).init(params)) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * specs.count(jf.model.spec(tied), tied)  # Adam keeps two of each number
    extra = specs.count(jf.model.spec(untied), untied) - specs.count(jf.model.spec(tied), tied)
    assert extra == embedding.size

    both, apart = (jax.jit(jax.grad(lambda p, cfg=cfg: jf.loss(p, batch, cfg)[0])) for cfg in (tied, untied))
    grads = apart(params | {"head": {"kernel": embedding.T}})
    parts = grads["embedding"]["token"], grads["head"]["kernel"].T
    assert all(np.abs(part).max() > 1e-3 for part in parts)
    # float32 sums in another order
    np.testing.assert_allclose(both(params)["embedding"]["token"], sum(parts), rtol=1e-4, atol=1e-6)


# Learning


def repeated(cfg: jf.ModelConfig, optim: jf.OptimConfig, batch: dict, steps: int):
    """The state and the losses after ``steps`` updates on one batch, as one program."""
    step = update(cfg, optim, steps)

    @jax.jit
    def run(state):
        return jax.lax.scan(lambda state, _: (lambda s, m: (s, m["loss"]))(*step(state, batch)), state, None, steps)

    return run(state_of(cfg, optim))


@pytest.mark.parametrize("name", tiny.PRESETS)
def test_one_batch_is_overfitted(name):
    cfg = dataclasses.replace(tiny.PRESETS[name], scan=True)
    batch = tiny.batch(cfg, rows=2, length=6)
    optim = jf.OptimConfig(lr=1e-2, schedule="cosine", warmup_steps=5, weight_decay=0.0)
    losses = np.asarray(repeated(cfg, optim, batch, 60)[1])
    assert losses[0] > 3.0
    assert losses[-1] < 0.05


def test_bfloat16_computes_over_float32_parameters():
    cfg = dataclasses.replace(shallow("llama_gqa"), dtype="bfloat16")
    batch = tiny.batch(cfg, rows=2, length=6)
    params = tiny.drawn(cfg)
    forward = jf.capture(lambda p: jf.forward(p, batch["tokens"], cfg), "*mlp.hidden")
    assert {x.dtype.name for x in jax.eval_shape(forward, params)[1].values()} == {"bfloat16"}
    state, losses = repeated(cfg, jf.OptimConfig(lr=1e-2, warmup_steps=5), batch, 30)
    assert losses[-1] < 0.5 * losses[0]
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params) + moments} == {"float32"}


DEEP = {
    "encoder_decoder": dataclasses.replace(MODELS["encoder_decoder"], n_layers=2, residual_dropout=0.2),
    "mixed_windows": dataclasses.replace(MODELS["decoder"], n_layers=3, window=(4, None, 4), residual_dropout=0.2),
}
VARIANTS = [
    ("encoder_decoder", {"scan": True, "remat": "dots"}),
    ("encoder_decoder", {"remat": "full"}),
    ("mixed_windows", {"scan": True, "remat": "full"}),
]


@functools.cache
def gradient(cfg: jf.ModelConfig):
    """The program, and the gradients by path."""
    params, batch, key = tiny.drawn(cfg), tiny.batch(cfg), jax.random.key(1)
    traced = jax.jit(jax.grad(lambda params: jf.loss(params, batch, cfg, key)[0])).trace(params)
    return str(traced.jaxpr), flatten_dict(traced.lower().compile()(params), sep=".")


@pytest.mark.parametrize(("name", "fields"), VARIANTS)
def test_scan_and_remat_change_no_gradient(name, fields):
    program, found = gradient(dataclasses.replace(DEEP[name], **fields))
    assert ("scan[" in program) == ("scan" in fields)
    assert ("remat" in program or "checkpoint[" in program) == ("remat" in fields)
    for path, leaf in gradient(DEEP[name])[1].items():
        # the same dropout, and float32 sums that XLA fuses in another way
        np.testing.assert_allclose(found[path], leaf, rtol=1e-4, atol=1e-5 * np.abs(leaf).max(), err_msg=path)
