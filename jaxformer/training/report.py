"""Reports of a run: progress bar, metrics.jsonl, TensorBoard events, loss.png."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from jaxformer.config.strict import import_paths, to_dict
from jaxformer.parallel import multihost
from jaxformer.training import records
from jaxformer.training.config import Config
from jaxformer.training.console import RunConsole
from jaxformer.training.events import Events
from jaxformer.training.failures import during
from jaxformer.training.tracking import Tracker

log = logging.getLogger(__name__)
PLAIN_EVERY = 10.0
"""Seconds between lines of progress where the output is not a terminal, which gets no progress bar."""


class Report:
    """Reports on a run in ``directory``, from update ``start`` to ``steps``; a context manager. ``fetch(step, metrics)`` gives
    metrics as floats, and raises FloatingPointError where they are to stop the run. ``watch`` is called with every update and
    its loss, and gives a line to print or "". ``peak_seconds``: what an update takes at the peak of the devices, for MFU; None:
    unknown. ``tracker`` gets every record too. With several processes, only the first prints and writes anything.

    Nothing is written before the first update: then records after ``start`` (of updates that a crash has undone) are dropped.
    """

    def __init__(
        self,
        directory: Path,
        start: int,
        steps: int,
        log_every: int,
        fetch: Callable[[int, Any], dict[str, float]],
        watch: Callable[[int, float], str] = lambda step, loss: "",
        peak_seconds: float | None = None,
        tracker: Tracker | None = None,
    ):
        self._writes = multihost.first()
        self.directory, self.console = directory, RunConsole(quiet=not self._writes)
        self._path = directory / "metrics.jsonl"
        self._file: BinaryIO | None = None
        self._events: Events | None = None
        self._start, self._steps, self._log_every, self._fetch, self._watch = start, steps, log_every, fetch, watch
        self._pending: tuple[int, Any] | None = None
        self._clock: float | None = None
        self._since: float | None = None
        self._spent, self._tokens, self._first, self._last_plain = 0.0, 0.0, start, -math.inf
        self._waited, self._updates = 0.0, 0
        self._peak_seconds = peak_seconds
        self._tracker = tracker or Tracker("none", directory, start)
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[shown]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=steps, completed=start, shown="")

    def __enter__(self) -> "Report":
        self._tracker.open()
        self._bar.start()
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            if kind is None:
                self.settle()
        finally:
            self._bar.stop()
            self._tracker.close(succeeded=kind is None)
            if self._file is not None:
                self._file.close()
            if self._events is not None:
                self._events.close()

    def timed(self, steps: Iterable[int]) -> Iterator[int]:
        """The steps, while the time of training alone is taken: without compiling, and without what comes between ``pause`` and
        the next step."""
        for step in steps:
            if self._since is None and step > self._start + 1:
                self.settle()  # waits for the devices: from here on their time counts
                self._since = time.perf_counter()
            yield step

    def waiting(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, while the time that training waits for each is taken; the devices are not waited for."""
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            if self._since is not None:
                self._waited += time.perf_counter() - began
            yield batch

    def train(self, step: int, metrics: Any) -> None:
        """To be called when update ``step`` has been dispatched. Its metrics are shown when the next one has been: reading them
        at once would wait for the devices."""
        self._open()
        self.settle()
        self._pending = (step, metrics)

    def pause(self) -> None:
        """Waits for the update, shows its metrics and stops the clock: what comes until the next step is not training."""
        self.settle()
        self._spent, self._since = self._training_seconds(), None

    def _training_seconds(self) -> float:
        return self._spent + (time.perf_counter() - self._since if self._since is not None else 0.0)

    def settle(self) -> None:
        """Waits for the update before and shows its metrics. Raises FloatingPointError where they are to stop the run."""
        if self._pending is None:
            return
        (step, pending), self._pending = self._pending, None
        metrics = self._fetch(step, pending)
        if self._clock is None:  # the first step includes compilation: the clock starts after it
            self._clock, self._first = time.perf_counter(), step
        else:
            self._tokens += metrics["weight"]
            self._updates += 1
        seconds = self._training_seconds()
        speed = self._tokens / seconds if seconds > 0 else 0.0
        shown = f"loss {metrics['loss']:.4f}" + (f"  {speed:,.0f} tokens/s" if speed else "")
        self._bar.update(self._task, completed=step, shown=shown)
        timings = {"tokens_per_second": speed, "waiting_for_data": self._waited / seconds} if speed else {}
        if speed and self._peak_seconds is not None:
            timings["mfu"] = self._updates * self._peak_seconds / seconds
        if step % self._log_every == 0:
            self._write(step, "train", metrics | timings)
        if line := self._watch(step, metrics["loss"]):
            self.console.print(line)
        if not self.console.is_terminal and time.perf_counter() - self._last_plain > PLAIN_EVERY and step > self._first:
            self._last_plain = time.perf_counter()
            left = (self._steps - step) * (time.perf_counter() - self._clock) / (step - self._first)
            self.console.print(f"step {step}/{self._steps}  {shown}  left {left / 60:.1f} min")

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        """Writes and prints the metrics of an evaluation."""
        self.settle()
        if metrics:
            self._write(step, "validation", metrics)
            values = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            self.console.print(Text.assemble((f"step {step}", "bold"), f"  validation {values}"))

    def draw(self) -> None:
        """Draws loss.png; only warns where that fails."""
        if not self._writes:
            return
        image = self.directory / "loss.png"
        try:
            records.draw_losses(self._path, image)
        except Exception as error:  # of the file system, of matplotlib, of fonts: none is worth a run
            log.warning("%s is not drawn: %s", image, getattr(error, "strerror", None) or error)

    def sample(self, step: int, title: str, text: str) -> None:
        """Prints a sample of the model's output, and writes it to the events."""
        if self._events is not None:
            self._events.text(step, "sample", f"```\n{text}\n```")
        self.console.rule(Text(title), align="left", style="dim")
        self.console.print(Text(text))
        self.console.rule(characters="-" if self.console.options.ascii_only else "─", style="dim")

    def _open(self) -> None:
        if self._file is None and self._writes:
            with during(f"could not continue {self._path}", self.directory):
                self._tracker.keep()
                records.keep_until(self._path, self._start)
                self._file = self._path.open("ab", buffering=0)  # a line that fails leaves nothing to be written again
            self._events = Events(self.directory / "tensorboard", self._start + 1)

    def _write(self, step: int, kind: str, metrics: dict[str, float]) -> None:
        if self._file is None or self._events is None:
            return
        line = records.line_of({"step": step, "kind": kind} | metrics)
        with during(f"could not write to {self._path}", self.directory):
            while line:  # a disk that fills up takes a part, and refuses the rest
                line = line[self._file.write(line) :]
        self._tracker.record(step, kind, metrics)
        self._events.scalars(step, {f"{kind}/{name}": value for name, value in metrics.items()})


def results(
    console: Console, config: Config, directory: Path, score: dict[str, float], best: int | None, seconds: float | None
) -> None:
    """Prints the results of a finished run, and where they are. seconds: how long it took; None if it was finished before."""
    trust = ", trust=True" if import_paths(Config, to_dict(config)) else ""
    rows = {"validation loss" if name == "loss" else name: f"{value:.4f}" for name, value in score.items()}
    rows |= {"best checkpoint": str(best)}
    rows |= {"time": f"{seconds:.0f} s"} if seconds is not None else {}
    rows |= {"curves": f"{directory}/loss.png, tensorboard --logdir {directory}", "records": f"{directory}/metrics.jsonl"}
    rows |= {"load it": f"cfg, params, tok = jaxformer.load({str(directory)!r}{trust})"}
    table = Table(title=f"Results after {config.train.steps} steps", show_header=False, title_justify="left")
    for row in rows.items():
        table.add_row(*map(Text, row))
    console.print(table)


def stopped(console: Console, step: int, directory: Path) -> None:
    """Prints where a run that was asked to stop can be gone on with."""
    console.print(f"Stopped after step {step}, saved in {directory}. The same command resumes from there.", soft_wrap=True)


def placements(console: Console, rows: list[tuple[str, str, str, str]]) -> None:
    """Prints where every parameter lies (``sharding.table``)."""
    table = Table(title="Parameters on the mesh", title_justify="left")
    for name in ("parameter", "letters", "shape", "on"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
