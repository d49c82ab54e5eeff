"""Records in experiment trackers: wandb, trackio and mlflow, by stand-ins for the three packages, and by themselves where they
are installed."""

import importlib.util
import json
import logging
import sqlite3
import sys
from types import SimpleNamespace

import pytest

import jaxformer as jf
from jaxformer.cli import suitable
from jaxformer.training import tracking
from jaxformer.training.report import Report
from jaxformer.training.tracking import Tracker

NAMES = ["wandb", "trackio", "mlflow"]
CONFIG = jf.Config(model=jf.presets.llama(vocab_size=16, d_model=16, n_layers=1, n_heads=2))


class StandIn:
    """The part of each package that is used. ``runs``: id -> [(step, values)]; ``begun``: their ids in order."""

    def __init__(self):
        self.runs, self.begun, self.ended, self.params = {}, [], [], {}
        self.fails = False

    def _begin(self, run_id):
        self.begun.append(run_id)
        self.runs.setdefault(run_id, [])
        return run_id

    def _add(self, step, values):
        if self.fails:
            raise ConnectionError("the network is down")
        self.runs[self.begun[-1]].append((step, values))

    # wandb and trackio

    def init(self, project, name, resume, config, id=None, dir=None):
        assert project == "jaxformer" and resume == "allow"
        self._begin(id or name)
        self.params |= config

        def log(values, step=None):
            values = dict(values)
            self._add(values.pop("step") if step is None else step, values)

        finish = lambda exit_code=None: self.ended.append(exit_code)
        return SimpleNamespace(log=log, finish=finish, define_metric=lambda name, step_metric: None)

    # mlflow

    def set_experiment(self, name):
        assert name == "jaxformer"

    def start_run(self, run_id, run_name):
        return SimpleNamespace(info=SimpleNamespace(run_id=self._begin(run_id or f"{run_name}{len(self.begun)}")))

    def log_params(self, params):
        assert len(params) <= 100, "mlflow takes no more at a time"
        self.params |= params

    def log_metrics(self, values, step):
        self._add(step, values)

    def end_run(self, status):
        self.ended.append(status)


@pytest.fixture(params=NAMES)
def tracker(request, monkeypatch):
    for variable in ("WANDB_PROJECT", "TRACKIO_PROJECT", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(variable, raising=False)
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, request.param, stand_in)
    return request.param, stand_in


def run(name, directory, start, until, crash=False):
    """Updates ``start`` + 1 to ``until``, with a validation after each even one; ``crash``: nothing is ended."""
    shown = Report(directory, start, 9, 1, lambda step, metrics: metrics, tracker=Tracker(name, directory, start, CONFIG))
    shown.__enter__()
    for step in range(start + 1, until + 1):
        shown.train(step, {"loss": 1.0 / step, "weight": 8.0})
        if step % 2 == 0:
            shown.validation(step, {"loss": 2.0 / step})
    if crash:
        shown.settle()
        shown._bar.stop()
        shown._file.close()
        shown._events.close()
    else:
        shown.__exit__(None, None, None)


def test_records_and_config_are_sent(tracker, tmp_path):
    name, stand_in = tracker
    run(name, tmp_path, 0, 2)
    (run_id,) = stand_in.runs
    assert [step for step, _ in stand_in.runs[run_id]] == [1, 2, 2]
    assert stand_in.runs[run_id][0][1]["train/loss"] == 1.0 and stand_in.runs[run_id][-1][1] == {"validation/loss": 1.0}
    assert stand_in.params["model.d_model"] == 16 and stand_in.params["train.steps"] == 1000 and len(stand_in.params) > 100
    assert json.loads((tmp_path / "tracker.json").read_bytes()) == {"tracker": name, "id": run_id}
    assert stand_in.ended and stand_in.ended[0] in (None, 0, "FINISHED")


def test_a_resumed_run_continues_there_and_sends_nothing_twice(tracker, tmp_path):
    """A crash after step 5, whose last checkpoint is at step 3."""
    name, stand_in = tracker
    run(name, tmp_path, 0, 5, crash=True)
    run(name, tmp_path, 3, 7)
    assert len(stand_in.begun) == 2 and len(stand_in.runs) == 1
    (sent,) = stand_in.runs.values()
    kind = lambda values: next(iter(values)).split("/")[0]
    assert [step for step, values in sent if kind(values) == "train"] == [1, 2, 3, 4, 5, 6, 7]
    assert [step for step, values in sent if kind(values) == "validation"] == [2, 4, 6]


def test_a_run_that_begins_anew_is_another_run(tracker, tmp_path):
    name, stand_in = tracker
    run(name, tmp_path, 0, 1, crash=True)
    run(name, tmp_path, 0, 2)
    first, second = stand_in.begun
    assert first != second and len(stand_in.runs[first]) == 1 and len(stand_in.runs[second]) == 3


def test_a_tracker_that_fails_does_not_end_the_run(tracker, tmp_path, caplog):
    name, stand_in = tracker
    stand_in.fails = True
    with caplog.at_level(logging.WARNING):
        run(name, tmp_path, 0, 3)
    assert [record.message for record in caplog.records] == [f"nothing is sent to {name} from here on: the network is down"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_tracker_that_refuses_to_begin_is_an_error_before_training(tracker, tmp_path):
    name, stand_in = tracker
    stand_in.init = stand_in.start_run = lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no API key"))
    with pytest.raises(ValueError, match=f"train.track='{name}' could not be started: no API key"):
        run(name, tmp_path, 0, 3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_that_is_not_installed_is_refused_with_its_extra(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = jf.Config(model=CONFIG.model, train=jf.TrainConfig(track=name))
    with pytest.raises(ValueError, match=rf"needs the package {name}: pip install 'jaxformer\[{name}\]'"):
        suitable.check(config, config.mesh.make())
    with pytest.raises(ValueError, match=rf"unknown track .*did you mean .{name}"):
        jf.TrainConfig(track=f"{name}s")


def test_only_the_first_process_sends(tracker, tmp_path, monkeypatch):
    name, stand_in = tracker
    monkeypatch.setattr(tracking.multihost, "first", lambda: False)
    sender = Tracker(name, tmp_path, 0, CONFIG)
    sender.open()
    sender.keep()
    sender.record(1, "train", {"loss": 1.0})
    sender.close(succeeded=True)
    assert not stand_in.begun and not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("default")  # those of the packages
@pytest.mark.parametrize("name", NAMES)
def test_the_package_itself_takes_what_it_is_sent(name, tmp_path, monkeypatch):
    """A run, and its continuation after a crash, offline."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    pytest.importorskip(name)  # the environment is read at import
    directory = tmp_path / "run"
    directory.mkdir()
    run(name, directory, 0, 3)
    run(name, directory, 3, 5)
    run_id = json.loads((directory / "tracker.json").read_bytes())["id"]
    if name == "mlflow":
        rows = sqlite3.connect(tmp_path / "mlflow.db").execute("select run_uuid, step from metrics where key = 'train/loss'")
        assert sorted(rows.fetchall()) == [(run_id, step) for step in range(1, 6)]
    elif name == "wandb":
        files = list(directory.glob(f"wandb/offline-run-*/run-{run_id}.wandb"))
        assert len(files) == 2 and all(b"train/loss" in file.read_bytes() for file in files)
    else:
        files = list((tmp_path / "trackio").rglob("*.db"))
        assert len(files) == 1
        rows = sqlite3.connect(files[0]).execute("select step, metrics from metrics where run_name = ?", (run_id,)).fetchall()
        assert sorted(step for step, metrics in rows if b"train/loss" in bytes(metrics)) == [1, 2, 3, 4, 5]
