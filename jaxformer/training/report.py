"""Reports of a run: progress bar, metrics.jsonl, TensorBoard events, loss.png."""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from jaxformer.parallel import multihost

PLAIN_EVERY = 10.0
"""Seconds between lines of progress where the output is not a terminal, which gets no progress bar."""


def show_log(console: Console) -> None:
    """Prints the library's log messages on the console, such as which kernel computes attention."""
    log = logging.getLogger("jaxformer")
    if console.quiet:  # not the first of several processes: warnings go where they would without a console
        return
    log.handlers = [RichHandler(console=console, show_time=False, show_path=False, show_level=False)]
    log.setLevel(logging.INFO)


class Report:
    """Reports on a run in ``directory``, from update ``start`` to ``steps``; a context manager. Records after ``start`` (of
    updates that a crash has undone) are dropped. ``fetch(step, metrics)`` turns a step's metrics into floats, and raises
    FloatingPointError where they are to stop the run. With several processes, only the first prints and writes anything."""

    def __init__(self, directory: Path, start: int, steps: int, log_every: int, fetch: Callable[[int, Any], dict[str, float]]):
        from tensorboardX import SummaryWriter

        self._writes = multihost.first()
        self.directory, self.console = directory, Console(highlight=False, quiet=not self._writes)
        self._path = directory / "metrics.jsonl" if self._writes else Path(os.devnull)
        if self._writes:
            _keep_until(self._path, start)
        self._file = self._path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(directory / "tensorboard"), purge_step=start + 1, write_to_disk=self._writes)
        self._steps, self._log_every, self._fetch = steps, log_every, fetch
        self._pending: tuple[int, Any] | None = None
        self._clock: float | None = None
        self._first, self._tokens, self._last_plain = start, 0.0, -math.inf
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
        self._bar.start()
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            if kind is None:
                self.settle()
        finally:
            self._bar.stop()
            self._file.close()
            self._events.close()

    def train(self, step: int, metrics: Any) -> None:
        """To be called when update ``step`` has been dispatched. Its metrics are shown when the next one has been: reading them
        at once would wait for the devices."""
        self.settle()
        self._pending = (step, metrics)

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
        elapsed = time.perf_counter() - self._clock
        speed = self._tokens / max(elapsed, 1e-9)
        shown = f"loss {metrics['loss']:.4f}  {speed:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, shown=shown)
        if step % self._log_every == 0:
            self._write(step, "train", metrics | ({"tokens_per_second": speed} if step > self._first else {}))
        if not self.console.is_terminal and time.perf_counter() - self._last_plain > PLAIN_EVERY and step > self._first:
            self._last_plain = time.perf_counter()
            left = (self._steps - step) * elapsed / (step - self._first)
            self.console.print(f"step {step}/{self._steps}  {shown}  left {left / 60:.1f} min")

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        """Writes, prints and draws the metrics of an evaluation."""
        self.settle()
        if metrics:
            self._write(step, "validation", metrics)
            self.console.print(f"[bold]step {step}[/]  validation " + "  ".join(f"{k} {v:.4f}" for k, v in metrics.items()))
        if self._writes:
            draw_losses(self._path, self.directory / "loss.png")

    def sample(self, step: int, title: str, text: str) -> None:
        """Prints a sample of the model's output, and writes it to the events."""
        self._events.add_text("sample", f"```\n{text}\n```", step)
        self.console.rule(title, align="left", style="dim")
        self.console.print(Text(text))
        self.console.rule(style="dim")

    def _write(self, step: int, kind: str, metrics: dict[str, float]) -> None:
        self._file.write(json.dumps({"step": step, "kind": kind} | metrics) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            self._events.add_scalar(f"{kind}/{name}", value, step)
        self._events.flush()


def results(console: Console, steps: int, directory: Path, score: dict[str, float], best: int | None, seconds: float) -> None:
    """Prints the results of a finished run, and where they are."""
    rows = {name: f"{value:.4f}" for name, value in score.items()}
    rows |= {"best checkpoint": str(best), "time": f"{seconds:.0f} s"}
    rows |= {"curves": f"{directory}/loss.png, tensorboard --logdir {directory}", "records": f"{directory}/metrics.jsonl"}
    rows |= {"load it": f"cfg, params, tok = jaxformer.load({str(directory)!r})"}
    table = Table(title=f"Results after {steps} steps", show_header=False, title_justify="left")
    for row in rows.items():
        table.add_row(*row)
    console.print(table)


def placements(console: Console, rows: list[tuple[str, str, str, str]]) -> None:
    """Prints where every parameter lies (``sharding.table``)."""
    table = Table(title="Parameters on the mesh", title_justify="left")
    for name in ("parameter", "letters", "shape", "on"):
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl, without a last line that a crash cut short."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return


def draw_losses(path: Path, image: Path) -> None:
    """Training and validation loss against the step, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss")
    for kind, style in (("train", {"linewidth": 0.8, "alpha": 0.7}), ("validation", {"marker": "o"})):
        points = [(r["step"], r["loss"]) for r in records(path) if r["kind"] == kind]
        if points:
            axes.plot(*zip(*points, strict=True), label=kind, **style)
    axes.grid(alpha=0.3)
    axes.legend()
    partial = image.with_suffix(".tmp.png")
    figure.savefig(partial, dpi=120)
    os.replace(partial, image)


def _keep_until(path: Path, step: int) -> None:
    kept = [json.dumps(record) + "\n" for record in records(path) if record["step"] <= step]
    partial = path.with_suffix(".tmp")
    partial.write_text("".join(kept), encoding="utf-8")
    os.replace(partial, path)
