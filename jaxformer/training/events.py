"""TensorBoard events of a run. What keeps them from being written is warned of once, and training goes on."""

import contextlib
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class Events:
    """Writes events into a folder; from ``first_step`` on, those that an earlier process wrote are hidden.

    tensorboardX's own writer is a thread, which ends at the first error, and whose full queue the training loop would then wait
    for; so its event files are written here directly.
    """

    def __init__(self, folder: Path, first_step: int):
        self._folder = folder
        self._writer: Any = None
        with self._warning():
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog

            folder.mkdir(exist_ok=True)
            # Files are named by the second: without the suffix, a quick restart would empty its predecessor's.
            self._writer = EventsWriter(str(folder / "events"), f".{time.time_ns():020}")
            self._writer.write_event(Event(step=first_step, file_version="brain.Event:2"))
            self._writer.write_event(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """The values of a step, by their names."""
        from tensorboardX.summary import scalar

        self._write(step, [scalar(name, value) for name, value in values.items() if math.isfinite(value)])

    def text(self, step: int, name: str, text: str) -> None:
        """A text of a step, in Markdown."""
        from tensorboardX.summary import text as summary

        self._write(step, [summary(name, text)])

    def close(self) -> None:
        with self._warning():
            if self._writer is not None:
                self._writer.close()

    def _write(self, step: int, summaries: list[Any]) -> None:
        from tensorboardX.proto.event_pb2 import Event

        with self._warning():
            if self._writer is not None:
                for summary in summaries:
                    self._writer.write_event(Event(step=step, wall_time=time.time(), summary=summary))
                self._writer.flush()

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.warning("TensorBoard events are no longer written: %s: %s", self._folder, error.strerror or error)
            writer, self._writer = self._writer, None
            with contextlib.suppress(OSError):  # a disk that is full refuses what is buffered once more
                if writer is not None:
                    writer.close()
