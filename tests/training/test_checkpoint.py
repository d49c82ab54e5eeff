"""Checkpoints: whole or skipped; which are kept; parameters without an optimizer."""

import dataclasses
import gc
import logging
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.training import run
from jaxformer.training.checkpoints import Checkpoints
from tests.states import CFG, assert_equal, at, listing, params_of, restore, save


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


@pytest.fixture
def collected():
    yield
    gc.collect()


def leaves_coroutines(test):
    """Orbax abandons the other reads when one array cannot be read: what is left of them must warn in no other test."""
    return pytest.mark.usefixtures("collected")(
        pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")(test)
    )


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    save(directory, at(3), at(6), losses=[2.0, 1.0])
    return directory


@pytest.fixture
def copy(two_steps, tmp_path) -> Path:
    return shutil.copytree(two_steps, tmp_path / "checkpoints")


@leaves_coroutines
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_an_incomplete_step_is_skipped_and_can_be_saved_again(copy, damage, caplog):
    damage(copy / "6")
    for _ in range(2):  # it may happen again
        caplog.clear()
        assert_equal(restore(copy), at(3))
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert str(copy / "6") in caplog.text and "NoneType" not in caplog.text
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
    assert_equal(restore(copy), at(6))
    assert kept(copy, 5)[1] == 3
    save(copy, at(9), losses=[0.5])
    assert kept(copy, 5)[1] == 9


@leaves_coroutines
def test_steps_of_which_none_can_be_read_stop_the_run_and_stay(copy):
    for step in ("3", "6"):
        truncated("params/d/*")(copy / step)
    before = listing(copy)
    for read in (restore, params_of):
        with pytest.raises(ValueError, match=r"none of the checkpoints in .* can be read(.|\n)*  6: .*\n  3: "):
            read(copy)
        assert listing(copy) == before
    for step in ("3", "6"):  # as former versions have left them
        (copy / step).rename(copy / f"{step}.broken")
    with pytest.raises(ValueError, match=r"holds only steps that could not be read \(3.broken, 6.broken\)"):
        restore(copy)


# Parameters alone


@leaves_coroutines
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
