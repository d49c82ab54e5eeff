"""Mistakes around the model: in sampling, caches, training, data, checkpoints and published configs. As in ``test_mistakes``,
each has a check that the library passes, and that fails as soon as the mistake is made in the library's own functions."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from golden import weights
from safetensors.numpy import save_file

import jaxformer as jf
from jaxformer import hf, training
from jaxformer.data import packing
from jaxformer.decode import choose, sampling
from jaxformer.hf.families.llama import window
from jaxformer.nn import cache_spec
from jaxformer.training import balance, optim, update
from jaxformer.training.checkpoints import Checkpoints

pytestmark = pytest.mark.usefixtures("quick_compilation")
VOCAB = 4


def shaped(sampler, logits, **history):
    methods, values = sampling.compile_sampling(sampler, 1, VOCAB)
    seen = choose.History(**{"prompt": np.zeros((1, VOCAB), bool), "counts": np.zeros((1, VOCAB), np.int32)} | history)
    return np.asarray(choose.shape(jnp.array([logits]), methods, values, seen, np.zeros(1, np.int32), ()))[0]


def narrowing_sees_the_temperature(folder):
    # At temperature 2 the probabilities are 0.46, 0.28, 0.17 and 0.10: three tokens reach 0.8. At 1, two would.
    kept = np.isfinite(shaped(jf.Sampling(temperature=2.0, top_p=0.8), [3.0, 2.0, 1.0, 0.0]))
    np.testing.assert_array_equal(kept, [True, True, True, False])


def a_prompt_has_no_presence_penalty(folder):
    history = {"prompt": np.array([[True, False, False, False]]), "counts": np.array([[0, 1, 0, 0]], np.int32)}
    found = shaped(jf.Sampling(temperature=1.0, presence_penalty=1.5), [0.0, 0.0, 0.0, 0.0], **history)
    np.testing.assert_array_equal(found, [0.0, -1.5, 0.0, 0.0])


def a_window_is_whole_in_the_cache(folder):
    cfg = dataclasses.replace(tiny.PRESETS["mistral"], n_layers=1)
    params, ids = tiny.drawn(cfg), tiny.tokens(cfg, batch=1, length=9)  # more than twice the window of 4
    whole, cache, parts = jax.jit(jf.forward, static_argnums=2)(params, ids, cfg), jf.init_cache(cfg, 1, 9), []
    for at in range(9):
        logits, cache = tiny.forward_cached(params, ids[:, at : at + 1], cfg, cache)
        parts.append(logits)
    # float32 sums of some dozens of terms of size 1
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-5, atol=1e-5)


def draw_noise(params, batch, rng):
    noise = jax.random.uniform(rng)
    return params["w"] * noise, {"weight": jnp.ones(()), "noise": noise, "square": noise**2}


def each_microbatch_draws_its_own_noise(folder):
    optimizer = optax.sgd(1.0)
    state = training.init_state({"w": jnp.ones(())}, optimizer, jax.random.key(0))
    metrics = training.make_update(draw_noise, optimizer, microbatches=2)(state, {"x": np.zeros((2, 1))})[1]
    assert metrics["square"] - metrics["noise"] ** 2 > 1e-4  # the variance of two draws


SGD = jf.OptimConfig(name="sgd", lr=1.0, warmup_steps=4, schedule="constant", beta1=0.0, weight_decay=0.0, clip_norm=0.0)


def the_first_update_has_its_share_of_the_warmup(folder):
    cfg = tiny.PRESETS["gpt2"]
    optimizer, params = training.optimizer(SGD, cfg, 8), jax.tree.map(jnp.ones_like, tiny.drawn(cfg))
    state, rates = optimizer.init(params), []
    for _ in range(5):
        updates, state = optimizer.update(params, state, params)
        rates.append(-float(updates["embedding"]["token"][0, 0]))
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]


def every_held_out_token_is_a_target_once(folder):
    for name, length in (("train", 400), ("validation", 101)):
        (folder / f"{name}.txt").write_text("abcdefghij" * (length // 10) + "k" * (length % 10))
    paths = {"path": str(folder / "train.txt"), "validation_path": str(folder / "validation.txt")}
    found = jf.data.load(jf.DataConfig(**paths, tokenizer="byte", length=8, batch_size=4))
    assert sum(batch["weights"].sum() for batch in found.validation) == 101  # 101 bytes and an end, of which the first is none


def the_newest_step_is_restored(folder):
    checkpoints = Checkpoints(folder, keep=2)
    optimizer = optax.sgd(1.0)
    state = training.init_state({"w": jnp.ones(2)}, optimizer, jax.random.key(0))
    for step in (1, 2):
        checkpoints.save(dataclasses.replace(state, step=jnp.int32(step)))
    checkpoints.wait()
    restored = checkpoints.restore(jax.eval_shape(lambda: state))
    checkpoints.close()
    assert int(restored.step) == 2


def a_mistral_without_a_word_of_windows_has_one(folder):
    """transformers' MistralConfig has sliding_window=4096 where config.json says nothing."""
    config, tensors, _ = weights.load("mistral")
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "sliding_window"}))
    save_file(tensors, folder / "model.safetensors")
    assert hf.load(folder)[0].window == 4096


def the_z_loss_is_a_mean_over_layers(folder):
    load = jnp.ones((2, 4))
    sums = {"load": load, "probability": load, "tokens": jnp.array([2.0, 2.0]), "log_z2": jnp.array([4.0, 8.0])}
    assert balance.penalty(sums, jf.Execution(balance_loss=0.0, router_z_loss=1.0)) == 3.0


# The mistakes: a module, a name, what stands in its place

_shape, _narrow, _penalised = choose.shape, choose.narrow, choose._penalised
_spec, _accumulate, _learning_rate = cache_spec.spec, update._accumulate, optim.learning_rate
_validation, _steps, _penalty, MISTRAL = packing.validation_batches, Checkpoints.steps, balance.penalty, hf.FAMILIES["mistral"]


def _narrowed_first(logits, methods, values, *rest):
    drawn = methods._replace(names=methods.names - set(sampling.NARROWING))
    return _shape(_narrow(logits, methods, values), drawn, values, *rest)


def _all_seen(logits, methods, values, history):
    return _penalised(logits, methods, values, history.replace(counts=history.counts + history.prompt))


def _short_ring(*args, **given):
    made = _spec(*args, **given)
    shorter = lambda param: dataclasses.replace(
        param, sizes=tuple((name, size - 2 if name == "S" else size) for name, size in param.sizes)
    )
    return made.replace(layers=tuple({name: shorter(param) for name, param in layer.items()} for layer in made.layers))


def _one_key(gradient, params, batch, rng, microbatches):
    return _accumulate(lambda params, part, _: gradient(params, part, rng), params, batch, rng, microbatches)


def _without_the_last_row(*args, **given):
    batches = list(_validation(*args, **given))
    weights = batches[-1]["weights"].copy()
    weights[np.flatnonzero(weights.any(1))[-1]] = 0
    return [*batches[:-1], batches[-1] | {"weights": weights}]


def _summed(sums, execution):
    return _penalty(sums, dataclasses.replace(execution, router_z_loss=execution.router_z_loss * len(sums["log_z2"])))


NO_DEFAULT = dataclasses.replace(MISTRAL, fields=MISTRAL.fields | {"window": window(None)})
MISTAKES = {
    "narrowing before the temperature": (narrowing_sees_the_temperature, choose, "shape", _narrowed_first),
    "presence penalty on the prompt": (a_prompt_has_no_presence_penalty, choose, "_penalised", _all_seen),
    "a ring too short for its window": (a_window_is_whole_in_the_cache, cache_spec, "spec", _short_ring),
    "one dropout key for all microbatches": (each_microbatch_draws_its_own_noise, update, "_accumulate", _one_key),
    "a schedule one step late": (
        the_first_update_has_its_share_of_the_warmup,
        optim,
        "learning_rate",
        lambda cfg, step, steps: _learning_rate(cfg, step - 1, steps),
    ),
    "the last validation row dropped": (
        every_held_out_token_is_a_target_once,
        packing,
        "validation_batches",
        _without_the_last_row,
    ),
    "the oldest checkpoint restored": (the_newest_step_is_restored, Checkpoints, "steps", lambda self: _steps(self)[::-1]),
    "Mistral without its default window": (a_mistral_without_a_word_of_windows_has_one, hf.FAMILIES, "mistral", NO_DEFAULT),
    "the router's z-loss summed over layers": (the_z_loss_is_a_mean_over_layers, balance, "penalty", _summed),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_passes_and_catches_the_mistake(mistake, monkeypatch, tmp_path):
    check, owner, name, wrong = MISTAKES[mistake]
    for folder in ("right", "wrong"):
        (tmp_path / folder).mkdir()
    check(tmp_path / "right")
    set_ = monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr
    set_(owner, name, wrong)
    with pytest.raises(AssertionError):
        check(tmp_path / "wrong")
