"""Checkpoints: whole or skipped, fitting or refused, the same on any number of devices."""

import dataclasses
import functools
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxformer as jf
from jaxformer import run
from jaxformer.parallel.data import PLACEMENTS
from jaxformer.spec import walk
from jaxformer.training.checkpoint import Checkpoints
from jaxformer.training.step import TrainState, init_state, make_update
from tests import tiny

CFG = jf.presets.llama(vocab_size=64, d_model=16, n_layers=1, n_heads=4, n_kv_heads=2, residual_dropout=0.2)
OPTIM = jf.OptimConfig(warmup_steps=2)
STEPS = 6


def fresh(cfg: jf.ModelConfig = CFG, optim: jf.OptimConfig = OPTIM) -> TrainState:
    return init_state(cfg, optim, STEPS, seed=0)


def like(cfg: jf.ModelConfig = CFG, optim: jf.OptimConfig = OPTIM) -> TrainState:
    return jax.eval_shape(functools.partial(fresh, cfg, optim))


def at(step: int, state: TrainState | None = None) -> TrainState:
    """A state of that step that differs from every other step's in every number."""
    state = state or fresh()
    add = lambda x: x + jnp.asarray(step, x.dtype)
    return dataclasses.replace(state, step=jnp.int32(step), params=jax.tree.map(add, state.params))


def content(state: TrainState) -> dict[str, np.ndarray]:
    """Every number of a state, by path; a key as the integers it is made of."""
    plain = dataclasses.replace(state, key=jax.random.key_data(state.key))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(plain)[0]}


def assert_equal(found: TrainState, expected: TrainState) -> None:
    assert jax.random.key_impl(found.key) == jax.random.key_impl(expected.key)
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


def test_restored_as_saved(tmp_path):
    save(tmp_path, at(3), at(5))
    assert_equal(restore(tmp_path), at(5))
    assert restore(tmp_path / "none") is None


def test_a_step_that_exists_is_left_as_it_is(tmp_path):
    other = dataclasses.replace(at(4), step=jnp.int32(3))
    save(tmp_path, at(3))
    save(tmp_path, other)
    assert_equal(restore(tmp_path), at(3))


# What is incomplete


def bare_directory(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


def without(name: str):
    return lambda step: shutil.rmtree(step / name)


def truncated(pattern: str):
    def damage(step: Path) -> None:
        files = [path for path in step.glob(pattern) if path.stat().st_size]
        assert files
        for path in files:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return damage


DAMAGE = {
    "bare directory": bare_directory,
    "no params": without("params"),
    "no rest": without("rest"),
    "truncated tree of params": truncated("params/_METADATA"),
    "truncated index of params": truncated("params/manifest.ocdbt"),
    "truncated arrays of params": truncated("params/d/*"),
    "truncated arrays of rest": truncated("rest/d/*"),
}
# Orbax leaves coroutines behind when one of the arrays that it reads at the same time cannot be read.
LEAVES_COROUTINES = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    save(directory, at(3), at(6), losses=[2.0, 1.0])
    return directory


@pytest.fixture
def copy(two_steps, tmp_path) -> Path:
    return shutil.copytree(two_steps, tmp_path / "checkpoints")


@LEAVES_COROUTINES
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_an_incomplete_step_is_skipped_and_can_be_saved_again(copy, damage, caplog):
    damage(copy / "6")
    for _ in range(2):  # it may happen again
        caplog.clear()
        assert_equal(restore(copy), at(3))
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert str(copy / "6") in caplog.text
        save(copy, at(6))
        assert_equal(restore(copy), at(6))
        damage(copy / "6")


def test_a_temporary_name_is_skipped_with_a_warning(copy, caplog):
    """What a process leaves behind that is killed while it saves."""
    (copy / "6").rename(copy / "6.orbax-checkpoint-tmp")
    assert_equal(restore(copy), at(3))
    assert str(copy / "6.orbax-checkpoint-tmp") in caplog.text
    save(copy, at(6))
    assert_equal(restore(copy), at(6))


def test_a_truncated_validation_loss_does_not_stop_a_run(copy):
    truncated("metrics/metrics")(copy / "6")
    found = restore(copy)
    assert_equal(found, at(int(found.step)))


@LEAVES_COROUTINES
def test_nothing_whole_is_nothing_to_restore(copy, caplog):
    for step in ("3", "6"):
        truncated("params/d/*")(copy / step)
    assert restore(copy) is None
    assert all(str(copy / step) in caplog.text for step in ("3", "6"))


# Parameters alone


def params_of(directory: Path, cfg: jf.ModelConfig = CFG) -> dict:
    checkpoints = Checkpoints(directory)
    try:
        return checkpoints.restore_params(like(cfg).params)
    finally:
        checkpoints.close()


@LEAVES_COROUTINES
@pytest.mark.parametrize("damage", ["bare directory", "truncated arrays of params"])
def test_reading_parameters_skips_but_changes_nothing(copy, damage, caplog):
    DAMAGE[damage](copy / "6")
    before = listing(copy)
    jax.tree.map(np.testing.assert_array_equal, params_of(copy), at(3).params)
    assert str(copy / "6") in caplog.text
    assert listing(copy) == before


def test_reading_parameters_leaves_alone_what_another_process_writes(copy):
    shutil.copytree(copy / "6", copy / "9.orbax-checkpoint-tmp")
    before = listing(copy)
    jax.tree.map(np.testing.assert_array_equal, params_of(copy), at(6).params)
    assert listing(copy) == before


def test_no_parameters_to_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        params_of(tmp_path)


def test_load_reads_no_optimizer(copy):
    """Not even one that is not there."""
    directory = copy.parent
    config = jf.Config(model=CFG, data=jf.DataConfig(tokenizer="byte"))
    run.write_run(directory, config, jf.tokenizer.train("byte", [], 0))
    shutil.rmtree(copy / "6" / "rest")
    before = listing(directory)
    cfg, params, tok = jf.load(directory)
    assert cfg == CFG
    jax.tree.map(np.testing.assert_array_equal, params, at(6).params)
    assert tok.decode(tok.encode("naïve")) == "naïve"
    assert listing(directory) == before


def test_load_says_what_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no config.json"):
        jf.load(tmp_path)
    run.write_run(tmp_path, jf.Config(model=CFG), jf.tokenizer.train("byte", [], 0))
    before = listing(tmp_path)
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        jf.load(tmp_path)
    assert listing(tmp_path) == before


# What does not fit


@pytest.mark.parametrize(
    ("fields", "lines"),
    [
        ({"qkv_bias": True}, {("missing", "attention.query_bias", ""), ("missing", "attention.key_bias", "")}),
        ({"tied_head": True}, {("unexpected", "head.kernel", "[16, 64]")}),
        ({"n_kv_heads": 4}, {("differs", "attention.key", "[1, 16, 4, 4], found float32[1, 16, 2, 4]")}),
        ({"n_layers": 2}, {("differs", "mlp.up", "[2, 16, 48], found float32[1, 16, 48]")}),
        ({"param_dtype": "bfloat16"}, {("differs", "embedding.token", "bfloat16[64, 16], found float32[64, 16]")}),
    ],
)
def test_another_architecture_is_refused_with_a_tree_diff(copy, fields, lines):
    other = dataclasses.replace(CFG, **fields)
    before = listing(copy)
    for attempt in (lambda: restore(copy, like(other)), lambda: params_of(copy, other)):
        with pytest.raises(ValueError) as caught:
            attempt()
        message = str(caught.value).splitlines()
        assert str(copy / "6") in message[0] and "params" in message[0]
        for kind, path, rest in lines:
            assert [line for line in message if line.split()[0] == kind and path in line and line.endswith(rest)], message
        same = set(dict(walk(like(other).params))) & set(dict(walk(like().params)))
        unchanged = [p for p in same if dict(walk(like(other).params))[p] == dict(walk(like().params))[p]]
        assert not [line for line in message for path in unchanged if path in line.split()]
    assert listing(copy) == before


def test_an_older_step_that_would_fit_is_not_taken_instead(tmp_path):
    other = dataclasses.replace(CFG, qkv_bias=True)
    save(tmp_path, at(3))
    save(tmp_path, at(6, fresh(other)))
    with pytest.raises(ValueError, match="query_bias"):
        restore(tmp_path)


def test_another_optimizer_is_refused(copy):
    with pytest.raises(ValueError, match="holds other rest than this run's"):
        restore(copy, like(optim=dataclasses.replace(OPTIM, clip_norm=0.0)))


# Devices and keys


@functools.cache
def sharded_by(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("data",))


def spread(state: TrainState, devices: int) -> TrainState:
    """Every array whose last axis divides is divided over the devices, all others are copied to each."""

    def put(x):
        divides = x.ndim and x.shape[-1] % devices == 0 and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        axes = [None] * (x.ndim - 1) + ["data"] if divides else []
        return jax.device_put(x, NamedSharding(sharded_by(devices), PartitionSpec(*axes)))

    return jax.tree.map(put, state)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_saved_over_four_devices_restored_on_others(tmp_path, devices):
    state = spread(at(3), 4)
    assert not state.params["embedding"]["token"].is_fully_replicated
    save(tmp_path, state)
    for kind, place in PLACEMENTS.items():
        placement = place(lambda axis_name: make_update(CFG, OPTIM, STEPS, axis_name=axis_name), jax.devices()[:devices])
        found = placement.put_state(restore(tmp_path))
        assert len(found.params["embedding"]["token"].sharding.device_set) == devices, kind
        assert_equal(placement.get_state(found), at(3))


READER = """
import sys, hashlib, jax
from tests.test_checkpoint import Path, content, restore
state = restore(Path(sys.argv[1]))
print(jax.device_count(), hashlib.sha256(b"".join(x.tobytes() for x in content(state).values())).hexdigest())
"""


def test_saved_over_four_devices_read_where_those_do_not_exist(tmp_path):
    """A process with fewer devices; in this one all eight always exist."""
    import hashlib

    save(tmp_path, spread(at(3), 4))
    digest = hashlib.sha256(b"".join(x.tobytes() for x in content(at(3)).values())).hexdigest()
    root = Path(__file__).parent.parent
    readers = []
    for devices in (1, 2):
        # the last of two equal flags is the one that counts; tests/conftest.py, which sets eight, is not imported
        flags = f"--xla_force_host_platform_device_count={devices}"
        environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(root)}
        command = [sys.executable, "-c", READER, str(shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-{devices}"))]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        readers.append(subprocess.Popen(command, cwd=root, env=environment, **pipes))
    for devices, reader in zip((1, 2), readers, strict=True):
        out, errors = reader.communicate(timeout=120)
        assert out.split() == [str(devices), digest], errors[-2000:]


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys_survive(tmp_path, kind):
    state = dataclasses.replace(at(3), key=jax.random.fold_in(jax.random.key(3, impl=kind), 5))
    save(tmp_path, state)
    found = restore(tmp_path, jax.eval_shape(lambda: state))
    assert_equal(found, state)
    draw = lambda key: jax.random.normal(jax.random.fold_in(key, 1), (4,))
    np.testing.assert_array_equal(draw(found.key), draw(state.key))


@pytest.mark.parametrize(("saved", "wanted"), [("threefry2x32", "rbg"), ("rbg", "threefry2x32"), ("rbg", "unsafe_rbg")])
def test_a_key_of_another_kind_is_refused(tmp_path, saved, wanted):
    save(tmp_path, dataclasses.replace(at(3), key=jax.random.key(3, impl=saved)))
    with pytest.raises(ValueError, match="key"):
        restore(tmp_path, dataclasses.replace(like(), key=jax.eval_shape(lambda: jax.random.key(3, impl=wanted))))


# Going on


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_three_steps_and_three_more_are_six_bitwise(tmp_path, kind):
    """With dropout. The steps after the save reuse the buffers of the state while it is being written."""
    make = lambda axis_name: make_update(CFG, OPTIM, STEPS, axis_name=axis_name)
    place = PLACEMENTS[kind](make, jax.devices()[:2])
    checkpoints = Checkpoints(tmp_path)

    def train(state, steps):
        state = place.put_state(state)
        for step in steps:
            state, _ = place.step(state, place.put_batch(tiny.batch(CFG, seed=step)))
            if step == 2:
                checkpoints.save(place.get_state(state))
        return place.get_state(state)

    whole = train(fresh(), range(STEPS))
    checkpoints.wait()
    restored = checkpoints.restore(like())
    checkpoints.close()
    assert int(restored.step) == 3
    assert any((a != b).any() for a, b in zip(content(restored).values(), content(whole).values(), strict=True))
    assert_equal(train(restored, range(3, STEPS)), whole)


# What is kept


def kept(directory: Path, keep: int) -> tuple[list[int], int | None]:
    checkpoints = Checkpoints(directory, keep)
    try:
        return checkpoints.steps(), checkpoints.best_step()
    finally:
        checkpoints.close()


@pytest.mark.parametrize(
    ("losses", "keep", "expected"),
    [
        ([5.0, 1.0, 3.0, 4.0], 2, ([2, 3, 4], 2)),
        ([5.0, 4.0, 3.0, 1.0], 2, ([3, 4], 4)),
        ([1.0, 2.0, 3.0, 4.0], 1, ([1, 4], 1)),
        ([3.0, None, 1.0, None], 1, ([3, 4], 3)),
        ([None] * 4, 2, ([3, 4], None)),
    ],
)
def test_the_newest_and_the_best_are_kept(tmp_path, losses, keep, expected):
    states = [at(step) for step in (1, 2, 3, 4)]
    save(tmp_path, *states[:2], losses=losses[:2], keep=keep)
    save(tmp_path, *states[2:], losses=losses[2:], keep=keep)  # a run that goes on knows the best of before
    assert kept(tmp_path, keep) == expected


def test_the_best_step_needs_a_loss_that_is_a_number(tmp_path):
    save(tmp_path, at(1), at(2), at(3), losses=[float("nan"), 2.0, float("nan")], keep=1)
    assert kept(tmp_path, 1) == ([2, 3], 2)
