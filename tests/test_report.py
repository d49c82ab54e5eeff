"""What stays of a run: metrics.jsonl, TensorBoard events, loss.png."""

import json
import time

import numpy as np
import pytest
from matplotlib.image import imread

from jaxformer.training.report import Report, draw_losses, records


def report(directory, start=0, steps=6, log_every=1, fetch=lambda step, metrics: dict(metrics)):
    return Report(directory, start, steps, log_every, fetch)


def train(shown, steps, loss=1.0):
    for step in steps:
        shown.train(step, {"loss": loss / step, "weight": 8.0})


def steps_of(directory, kind="train"):
    return [record["step"] for record in records(directory / "metrics.jsonl") if record["kind"] == kind]


def test_every_logged_step_is_recorded(tmp_path):
    with report(tmp_path) as shown:
        train(shown, range(1, 5))
        shown.validation(4, {"loss": 0.5, "accuracy": 0.25})
    assert steps_of(tmp_path) == [1, 2, 3, 4] and steps_of(tmp_path, "validation") == [4]
    second, last = list(records(tmp_path / "metrics.jsonl"))[1], list(records(tmp_path / "metrics.jsonl"))[-1]
    assert second["loss"] == 0.5 and second["tokens_per_second"] > 0
    assert last == {"step": 4, "kind": "validation", "loss": 0.5, "accuracy": 0.25}


def test_log_every(tmp_path):
    with report(tmp_path, log_every=2) as shown:
        train(shown, range(1, 7))
    assert steps_of(tmp_path) == [2, 4, 6]


def test_metrics_are_fetched_when_the_next_step_has_been_dispatched(tmp_path):
    events = []

    def fetch(step, metrics):
        events.append(("fetched", step))
        return metrics

    with report(tmp_path, fetch=fetch) as shown:
        for step in (1, 2, 3):
            events.append(("dispatched", step))
            shown.train(step, {"step": step, "loss": 1.0, "weight": 1.0})
    order = [("dispatched", 1), ("dispatched", 2), ("fetched", 1), ("dispatched", 3), ("fetched", 2), ("fetched", 3)]
    assert events == order


def test_going_on_drops_what_came_after_the_checkpoint(tmp_path):
    """A crash after step 5, the last checkpoint at step 3, and a line that was cut short."""
    with report(tmp_path) as shown:
        train(shown, range(1, 6))
    path = tmp_path / "metrics.jsonl"
    before = path.read_text().splitlines()
    path.write_text("\n".join([*before, '{"step": 6, "kind": "tr']))
    with report(tmp_path, start=3) as shown:
        assert steps_of(tmp_path) == [step for step in (1, 2, 3) if any(f'"step": {step},' in line for line in before)]
        train(shown, range(4, 7), loss=2.0)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["step"] for r in found] == [1, 2, 3, 4, 5, 6]
    assert [round(r["loss"] * r["step"]) for r in found] == [1, 1, 1, 2, 2, 2]


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "kind": "train"}\n{"step": 2, "ki')
    assert list(records(path)) == [{"step": 1, "kind": "train"}]
    assert list(records(tmp_path / "absent.jsonl")) == []


def test_the_drawing_is_a_png_with_both_curves(tmp_path):
    path, images = tmp_path / "metrics.jsonl", []
    for kinds in (["train"], ["train", "validation"]):
        lines = [{"step": step, "kind": kind, "loss": 1 / step} for kind in kinds for step in range(1, 6)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        draw_losses(path, tmp_path / "loss.png")
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        images.append(imread(tmp_path / "loss.png"))
    assert images[0].shape == images[1].shape and images[0].shape[0] > 400
    assert not np.array_equal(*images)
    assert {p.name for p in tmp_path.iterdir()} == {"metrics.jsonl", "loss.png"}


def test_tensorboard_reads_the_events_and_forgets_undone_steps(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with report(tmp_path) as shown:
        train(shown, range(1, 6))
        shown.validation(5, {"loss": 0.5})
        shown.sample(5, "a sample", "text")
    time.sleep(1.1)  # event files are named by the second
    with report(tmp_path, start=3) as shown:
        train(shown, range(4, 7), loss=2.0)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {event.step: event.value * event.step for event in events.Scalars("train/loss")}
    expected = {record["step"]: record["loss"] * record["step"] for record in records(tmp_path / "metrics.jsonl")}
    assert found.keys() == expected.keys() and max(found) == 6
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-6)  # events are float32
    assert [event.step for event in events.Scalars("validation/loss")] == []
