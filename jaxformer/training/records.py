"""metrics.jsonl: a JSON object per line, read and continued whatever has happened to it, and drawn as loss.png."""

import io
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxformer.tokenizers import disk_cache
from jaxformer.training.directory import set_aside

log = logging.getLogger(__name__)
TIMINGS = ("tokens_per_second", "mfu", "waiting_for_data")
"""Fields of a record that say how fast training went: they differ between runs that are otherwise bit for bit equal."""


def line_of(record: dict[str, Any]) -> bytes:
    """A record as a line; numbers that are not finite, which JSON does not have, as null."""
    plain = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in record.items()}
    return json.dumps(plain, allow_nan=False).encode() + b"\n"


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl, without lines that cannot be read."""
    if path.exists():
        yield from (record for _, record in _lines(path.read_bytes()) if record is not None)


def validation_at(path: Path, step: int) -> dict[str, float]:
    """The metrics of the evaluation after a step; empty if there was none."""
    evaluations = [record for record in records(path) if record.get("step") == step and record.get("kind") == "validation"]
    return (
        {name: value for name, value in evaluations[-1].items() if name != "step" and _is_number(value)} if evaluations else {}
    )


def last_steps(path: Path) -> dict[str, int]:
    """``kind -> the last step`` of the records of a metrics.jsonl."""
    last: dict[str, int] = {}
    for record in records(path):
        if _is_number(step := record.get("step", 0)):
            kind = str(record.get("kind"))
            last[kind] = max(int(step), last.get(kind, 0))
    return last


def keep_until(path: Path, step: int) -> None:
    """Removes the records of updates after ``step``, which a crash has undone, and a last line that it cut short.

    If any other line cannot be read, a warning names it, and the whole file is kept beside as ``metrics.jsonl.broken``. If
    training begins anew although there have been evaluations, it is kept as ``metrics.jsonl.before``.
    """
    if not path.exists():
        return
    content = path.read_bytes()
    lines = _lines(content)
    broken = [number for number, (_, record) in enumerate(lines, 1) if record is None and number < len(lines)]
    kept = b"".join(line + b"\n" for line, record in lines if record is not None and not _is_after(record, step))
    if broken:
        aside = set_aside(path, "broken")
        numbers = ("line " if len(broken) == 1 else "lines ") + ", ".join(map(str, broken))
        log.warning("%s of %s cannot be read; the original file is kept as %s", numbers, path, aside.name)
    if step == 0 and not broken and any(record.get("kind") == "validation" for _, record in lines if record is not None):
        aside = set_aside(path, "before")
        log.warning("training begins at step 0, as there is no checkpoint; the earlier records are kept as %s", aside.name)
    if kept != content:
        disk_cache.write(path, kept)


def _lines(content: bytes) -> list[tuple[bytes, dict[str, Any] | None]]:
    """Lines with their records, None for a line that holds none. Lines with NaN, as earlier versions wrote, are rewritten."""
    lines: list[tuple[bytes, dict[str, Any] | None]] = []
    for line in content.removesuffix(b"\n").split(b"\n") if content else ():
        constants: list[str] = []
        try:
            record = json.loads(line.decode("utf-8-sig"), parse_constant=constants.append)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            record = None
        lines.append((json.dumps(record).encode() if constants and record is not None else line, record))
    return lines


def _is_after(record: dict[str, Any], step: int) -> bool:
    return _is_number(record.get("step")) and record["step"] > step


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def draw_losses(path: Path, image: Path) -> None:
    """Training and validation loss against the step, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss")
    drawable = [r for r in records(path) if _is_number(r.get("step")) and _is_number(r.get("loss"))]
    for kind, style in (("train", {"linewidth": 0.8, "alpha": 0.7}), ("validation", {"marker": "o"})):
        points = [(r["step"], r["loss"]) for r in drawable if r.get("kind") == kind]
        if points:
            axes.plot(*zip(*points, strict=True), label=kind, **style)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    content = io.BytesIO()
    figure.savefig(content, dpi=120, format="png")
    disk_cache.write(image, content.getvalue())
