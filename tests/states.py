"""Training states that differ in every parameter, saved and restored, for the tests of checkpoints."""

import dataclasses
import functools
import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxformer as jf
from jaxformer.training import run
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.objective import next_token
from jaxformer.training.optim import optimizer
from jaxformer.training.update import TrainState, init_state, make_update
from tests import tiny

CFG = jf.presets.llama(vocab_size=64, d_model=16, n_layers=1, n_heads=4, n_kv_heads=2, residual_dropout=0.2)
OPTIM = jf.OptimConfig(warmup_steps=2)
STEPS = 6


def initial(cfg: jf.ModelConfig, optim: jf.OptimConfig, steps: int, seed: int = 0) -> TrainState:
    """The state that a run of ``steps`` updates starts from."""
    return run.initial_state(jf.Config(model=cfg, optim=optim, train=jf.TrainConfig(steps=steps, seed=seed)))


def update(cfg: jf.ModelConfig, optim: jf.OptimConfig, steps: int, microbatches: int = 1, **options):
    """The update of a run of ``steps`` updates, by the objective of language models."""
    return make_update(next_token(cfg, **options), optimizer(optim, cfg, steps), microbatches)


def fresh(cfg: jf.ModelConfig = CFG, optim: jf.OptimConfig = OPTIM) -> TrainState:
    return init_state(tiny.drawn(cfg), optimizer(optim, cfg, STEPS), jax.random.key(5))


def like(cfg: jf.ModelConfig = CFG, optim: jf.OptimConfig = OPTIM) -> TrainState:
    return jax.eval_shape(functools.partial(initial, cfg, optim, STEPS))


def at(step: int, state: TrainState | None = None) -> TrainState:
    """A state of that step whose parameters all differ from every other step's."""
    state = state or fresh()
    params = jax.tree.map(lambda x: jnp.asarray(np.asarray(x) + np.asarray(step, x.dtype)), state.params)
    return dataclasses.replace(state, step=jnp.int32(step), params=params)


def content(state: TrainState) -> dict[str, np.ndarray]:
    """Every number of a state, by path; a key as the integers it is made of."""
    plain = dataclasses.replace(state, rng=jax.random.key_data(state.rng))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(plain)[0]}


def digest(state: TrainState) -> str:
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in content(state).values())).hexdigest()


def assert_equal(found: TrainState, expected: TrainState) -> None:
    assert jax.random.key_impl(found.rng) == jax.random.key_impl(expected.rng)
    a, b = content(found), content(expected)
    assert list(a) == list(b)
    for path in b:
        assert a[path].dtype == b[path].dtype, path
        np.testing.assert_array_equal(a[path], b[path], err_msg=path)


def save(directory: Path, *states: TrainState, losses: list | None = None, keep: int = 5) -> None:
    checkpoints = Checkpoints(directory, keep)
    for i, state in enumerate(states):
        checkpoints.save(state, losses[i] if losses else None)
    checkpoints.wait()
    checkpoints.close()


def restore(directory: Path, expected: TrainState | None = None) -> TrainState | None:
    checkpoints = Checkpoints(directory)
    try:
        return checkpoints.restore(expected or like())
    finally:
        checkpoints.close()


def listing(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def params_of(directory: Path, cfg: jf.ModelConfig = CFG) -> dict:
    checkpoints = Checkpoints(directory)
    try:
        return checkpoints.restore_params(like(cfg).params)
    finally:
        checkpoints.close()
