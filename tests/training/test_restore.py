"""Restoring: what does not fit is refused, and any number of devices restores what any other has saved, bit for bit."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformer.parallel.placement import PLACEMENTS
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.update import TrainState
from tests import tiny
from tests.states import (
    CFG,
    OPTIM,
    STEPS,
    assert_equal,
    at,
    content,
    digest,
    fresh,
    like,
    listing,
    params_of,
    restore,
    save,
    update,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def saved(tmp_path):
    save(tmp_path, at(3), at(6))
    return tmp_path


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
def test_another_architecture_is_refused_with_a_tree_diff(saved, fields, lines):
    other = dataclasses.replace(CFG, **fields)
    before = listing(saved)
    for attempt in (lambda: restore(saved, like(other)), lambda: params_of(saved, other)):
        with pytest.raises(ValueError) as caught:
            attempt()
        message = str(caught.value).splitlines()
        assert str(saved / "6") in message[0] and "params" in message[0]
        for kind, path, rest in lines:
            assert [line for line in message if line.split()[0] == kind and path in line and line.endswith(rest)], message
        if "param_dtype" not in fields:
            assert not [line for line in message if "decoder.norm.gain" in line]  # what fits is left out
    assert listing(saved) == before


def test_an_older_step_that_would_fit_is_not_taken_instead(tmp_path):
    other = dataclasses.replace(CFG, qkv_bias=True)
    save(tmp_path, at(3))
    save(tmp_path, at(6, fresh(other)))
    with pytest.raises(ValueError, match="query_bias"):
        restore(tmp_path)


def test_another_optimizer_is_refused(saved):
    with pytest.raises(ValueError, match="does not fit this run; its rest differ"):
        restore(saved, like(optim=dataclasses.replace(OPTIM, clip_norm=0.0)))


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


@pytest.mark.parametrize("kind", PLACEMENTS)
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_saved_over_four_devices_restored_on_others(tmp_path, kind, devices):
    state = spread(at(3), 4)
    assert not state.params["embedding"]["token"].is_fully_replicated
    save(tmp_path, state)
    unchanged = lambda state, batch: (state, {})
    placement = PLACEMENTS[kind](unchanged, jax.devices()[:devices])
    found, _ = placement.step(placement.put_state(restore(tmp_path)), placement.put_batch({"tokens": np.zeros((8, 1))}))
    assert len(found.params["embedding"]["token"].sharding.device_set) == devices
    assert_equal(placement.get_state(found), at(3))


READER = """
import sys, jax
from pathlib import Path
from tests.states import digest, restore
state = restore(Path(sys.argv[1]))
print(jax.device_count(), state and digest(state))
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_saved_over_four_devices_read_where_those_do_not_exist(tmp_path, devices):
    """A process with fewer devices: in this one all eight always exist."""
    save(tmp_path, spread(at(3), 4))
    root = Path(__file__).parents[2]
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", READER, str(tmp_path)]
    reader = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)
    assert reader.stdout.split() == [str(devices), digest(at(3))], reader.stderr[-2000:]


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys_survive(tmp_path, kind):
    state = dataclasses.replace(at(3), rng=jax.random.fold_in(jax.random.key(3, impl=kind), 5))
    save(tmp_path, state)
    found = restore(tmp_path, jax.eval_shape(lambda: state))
    assert_equal(found, state)
    draw = lambda key: jax.random.normal(jax.random.fold_in(key, 1), (4,))
    np.testing.assert_array_equal(draw(found.rng), draw(state.rng))


@pytest.mark.parametrize(("kind", "wanted"), [("threefry2x32", "rbg"), ("rbg", "threefry2x32"), ("rbg", "unsafe_rbg")])
def test_a_key_of_another_kind_is_refused(tmp_path, kind, wanted):
    save(tmp_path, dataclasses.replace(at(3), rng=jax.random.key(3, impl=kind)))
    with pytest.raises(ValueError, match="key"):
        restore(tmp_path, dataclasses.replace(like(), rng=jax.eval_shape(lambda: jax.random.key(3, impl=wanted))))


# Going on


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_three_steps_and_three_more_are_six_bitwise(tmp_path, kind):
    """With dropout. The steps after the save reuse the buffers of the state while it is being written."""
    place = PLACEMENTS[kind](update(CFG, OPTIM, STEPS), jax.devices()[:2])
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
