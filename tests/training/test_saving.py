"""Saves between evaluations, by steps and by the clock, and traces of some steps."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from rich.console import Console

import jaxformer as jf
from jaxformer.cli import train
from jaxformer.training import run, saving
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.directory import saved_steps

pytestmark = pytest.mark.usefixtures("quick_compilation")


def config(directory, **settings):
    (directory.parent / "text.txt").write_text("one two three, " * 60)
    return jf.Config(
        model=jf.presets.llama(vocab_size=16, d_model=16, n_layers=1, n_heads=2),
        data=jf.DataConfig(path=str(directory.parent / "text.txt"), tokenizer="char", length=8, batch_size=8),
        train=jf.TrainConfig(**{"steps": 6, "eval_every": 6, "log_every": 1, "sample_tokens": 0} | settings),
        run_dir=str(directory),
    )


def end(directory):
    checkpoints = Checkpoints(directory / "checkpoints")
    state = checkpoints.restore(jax.eval_shape(lambda: run.initial_state(run.read_run(directory))))
    checkpoints.close()
    return jax.tree.map(np.asarray, state.replace(rng=jax.random.key_data(state.rng)))


def test_a_run_goes_on_from_a_save_that_is_no_evaluation(tmp_path, monkeypatch):
    train.main(config(tmp_path / "whole"))
    assert saved_steps(tmp_path / "whole") == [6]
    asked = config(tmp_path / "run", save_every=2)
    shown = train.Report.train

    def die(self, step, metrics):
        shown(self, step, metrics)
        if step == 5:
            raise OSError("as a process that dies")

    monkeypatch.setattr(train.Report, "train", die)
    with pytest.raises(OSError, match="dies"):
        train.main(asked)
    assert saved_steps(tmp_path / "run") == [2, 4]
    monkeypatch.undo()
    train.main(asked)
    jax.tree.map(np.testing.assert_array_equal, end(tmp_path / "run"), end(tmp_path / "whole"))


def test_the_clock_asks_for_a_save_once_its_time_has_passed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(saving.time, "monotonic", lambda: now[0])
    is_due = saving.due(jf.TrainConfig(save_minutes=1.0))
    found = []
    for now[0] in (30.0, 59.0, 61.0, 100.0, 121.0, 122.0):
        found.append(is_due(1))
    assert found == [False, False, True, False, True, False]


def test_the_late_answer_of_several_processes_saves_once(monkeypatch):
    """Each call gives what was asked at the call before, as between processes."""
    now, answers = [0.0], [False]

    def one_call_late(ask):
        def asked():
            answers.append(ask())
            return answers[-2]

        return asked

    monkeypatch.setattr(saving, "anyone", one_call_late)
    monkeypatch.setattr(saving.time, "monotonic", lambda: now[0])
    is_due = saving.due(jf.TrainConfig(save_minutes=1.0))
    found = []
    for now[0] in (50.0, 61.0, 62.0, 63.0, 64.0, 65.0, 130.0, 131.0, 132.0):
        found.append(is_due(1))
    assert found == [False, False, True, False, False, False, False, True, False]


def test_both_may_be_off():
    is_due = saving.due(jf.TrainConfig())
    assert not any(map(is_due, range(1, 2000)))


@pytest.mark.parametrize("profile", ["3:4", "5:6"])
def test_a_trace_of_the_steps_asked_for(profile, tmp_path, capsys):
    train.main(config(tmp_path / "run", profile=profile))
    assert "the trace is in " in capsys.readouterr().out
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))


def test_a_run_that_goes_on_among_the_steps_traces_the_rest(tmp_path, monkeypatch):
    began = []
    monkeypatch.setattr(saving.jax.profiler, "start_trace", began.append)
    monkeypatch.setattr(saving.jax.profiler, "stop_trace", lambda: began.append("end"))
    settled = SimpleNamespace(directory=tmp_path, console=Console(quiet=True), settle=lambda: began.append("wait"))
    with saving.profiled(jf.TrainConfig(steps=6, profile="2:4"), settled) as before:
        for step in (3, 4, 5, 6):
            before(step)
    assert began == [tmp_path / "profile", "wait", "end"]


@pytest.mark.parametrize("profile", ["10", "4:3", "0:2", "5:7", "a:b"])
def test_steps_that_cannot_be_traced_are_refused(profile):
    with pytest.raises(ValueError, match=re.escape(f"train.profile={profile!r} must be the first and the last step to trace")):
        dataclasses.replace(jf.TrainConfig(steps=6), profile=profile)
