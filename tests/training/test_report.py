"""What stays of a run: metrics.jsonl, TensorBoard events, loss.png."""

import json
import logging

import numpy as np
import pytest
from matplotlib.image import imread

from jaxformer.training import report as reports
from jaxformer.training.records import draw_losses, keep_until, records, validation_at
from jaxformer.training.report import Report


def report(directory, start=0, steps=6, log_every=1, fetch=lambda step, metrics: dict(metrics)):
    return Report(directory, start, steps, log_every, fetch)


def train(shown, steps, loss=1.0):
    for step in shown.timed(steps):
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
        assert path.read_text().splitlines()[:-1] == before, "nothing is written before the first update"
        train(shown, range(4, 7), loss=2.0)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["step"] for r in found] == [1, 2, 3, 4, 5, 6]
    assert [round(r["loss"] * r["step"]) for r in found] == [1, 1, 1, 2, 2, 2]


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "kind": "train"}\n{"step": 2, "ki')
    assert list(records(path)) == [{"step": 1, "kind": "train"}]
    assert list(records(tmp_path / "absent.jsonl")) == []


BAD = {
    "cut": b'{"step": 2, "ki',
    "blank": b"",
    "number": b"3",
    "list": b"[]",
    "not UTF-8": b"\xff\xfe",
    "zeros": b"\0\0\0\0",
    "nested": b"[" * 100_000,
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_bad_line_costs_no_other(bad, tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    good = [b'{"step": %d, "kind": "train", "loss": 1.50}' % step for step in range(1, 6)]
    note, separator = b'{"note": "by hand"}', b'{"step": 2, "text": "\xe2\x80\xa8 separates no lines"}'
    content = b"\n".join([good[0], bad, note, good[1], separator, bad, *good[2:], b'{"step": 6, "kind": "tr'])
    path.write_bytes(content)
    assert [record.get("step") for record in records(path)] == [1, None, 2, 2, 3, 4, 5]
    keep_until(path, 4)
    assert path.read_bytes() == b"\n".join([good[0], note, good[1], separator, *good[2:4], b""])
    assert (tmp_path / "metrics.jsonl.broken").read_bytes() == content
    (message,) = caplog.messages
    assert "lines 2, 6 of " in message and "kept as metrics.jsonl.broken" in message
    path.write_bytes(content)
    keep_until(path, 4)
    assert (tmp_path / "metrics.jsonl.broken1").read_bytes() == content, "what was kept before stays"


@pytest.mark.parametrize("last", [bad for name, bad in BAD.items() if name != "blank"])
def test_a_broken_last_line_is_dropped_without_a_word(last, tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    for end in (b"", b"\n"):
        path.write_bytes(b'{"step": 1}\n' + last + end)
        keep_until(path, 9)
        assert path.read_bytes() == b'{"step": 1}\n'
    assert not caplog.messages and [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_file_without_fault_is_not_written_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1, "loss": 1e3}\n')
    before = path.stat()
    keep_until(path, 1)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_numbers_that_json_does_not_have_are_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "kind": "validation", "loss": NaN, "accuracy": -Infinity}\n')  # as earlier versions wrote
    with report(tmp_path, start=1) as shown:
        shown.train(2, {"loss": 1.0, "weight": 8.0, "ratio": float("inf")})
        shown.validation(2, {"loss": float("nan"), "accuracy": 0.5})
        shown.draw()

    def refuse(constant):
        raise AssertionError(constant)

    found = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [[record.get(name) for name in ("loss", "ratio", "accuracy")] for record in found] == [
        [None, None, None],
        [1.0, None, None],
        [None, None, 0.5],
    ]
    assert validation_at(path, 2) == {"accuracy": 0.5}
    assert (tmp_path / "loss.png").exists()


def test_what_is_in_the_way_of_drawings_and_events_is_only_warned_of(tmp_path, caplog):
    (tmp_path / "loss.png").mkdir()
    (tmp_path / "tensorboard").write_text("a file")
    with report(tmp_path) as shown:
        train(shown, range(1, 4))
        shown.validation(3, {"loss": 0.5})
        shown.draw()
        shown.sample(3, "a sample", "text")
    assert steps_of(tmp_path) == [1, 2, 3] and steps_of(tmp_path, "validation") == [3]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl", "tensorboard"]
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 2 and "TensorBoard events are no longer written" in warned[0] and "loss.png is not drawn" in warned[1]


def test_a_disk_that_fills_up_is_said_with_the_path_and_what_is_safe(tmp_path):
    class Full:
        def write(self, line):
            raise OSError(28, "No space left on device")

        close = list

    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    message = (
        "could not write to .*metrics.jsonl: No space left on device; the last saved step is 3, from which the same command"
    )
    with pytest.raises(OSError, match=message), report(tmp_path) as shown:
        train(shown, [1])
        shown._file.close()
        shown._file = Full()
        train(shown, [2, 3])


def test_the_rate_is_that_of_training_alone(tmp_path, monkeypatch):
    """A second per step; compiling takes 30, evaluating and saving 100."""
    now = [0.0]
    monkeypatch.setattr(reports.time, "perf_counter", lambda: now[0])
    with report(tmp_path, steps=9) as shown:
        for step in shown.timed(range(1, 10)):
            now[0] += 30.0 if step == 1 else 1.0
            shown.train(step, {"loss": 1.0, "weight": 8.0})
            if step % 3 == 0:
                shown.pause()
                now[0] += 100.0
                shown.validation(step, {"loss": 1.0})
    rates = [record.get("tokens_per_second") for record in records(tmp_path / "metrics.jsonl") if record["kind"] == "train"]
    # Metrics are shown a step later; where the devices are waited for, the times are exact.
    assert rates[0] is None and [rates[i] for i in (2, 5, 8)] == [8.0] * 3
    assert all(4.0 <= rate <= 8.0 for rate in rates[1:])


def test_the_share_of_time_spent_waiting_for_data(tmp_path, monkeypatch):
    """A batch takes 3 seconds and an update 1; what is waited for while compiling does not count."""
    now = [0.0]
    monkeypatch.setattr(reports.time, "perf_counter", lambda: now[0])

    def slow():
        while True:
            now[0] += 3.0
            yield {}

    with Report(tmp_path, 0, 6, 1, lambda step, metrics: dict(metrics), peak_seconds=1.0) as shown:
        batches = shown.waiting(slow())
        for step in shown.timed(range(1, 7)):
            next(batches)
            now[0] += 1.0
            shown.train(step, {"loss": 1.0, "weight": 8.0})
    found = [record.get("waiting_for_data") for record in records(tmp_path / "metrics.jsonl")]
    assert found[0] is None and found[-1] == 0.75
    assert list(records(tmp_path / "metrics.jsonl"))[-1]["mfu"] == 0.25  # an update of 4 seconds takes 1 at the peak


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
    with report(tmp_path, start=3) as shown:
        train(shown, range(4, 7), loss=2.0)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {event.step: event.value * event.step for event in events.Scalars("train/loss")}
    expected = {record["step"]: record["loss"] * record["step"] for record in records(tmp_path / "metrics.jsonl")}
    assert found.keys() == expected.keys() and max(found) == 6
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-6)  # events are float32
    assert [event.step for event in events.Scalars("validation/loss")] == []
