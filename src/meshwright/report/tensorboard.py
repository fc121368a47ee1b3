"""Writes TensorBoard scalars from the events of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.core.events import Event
from meshwright.report.scalars import scalars_of

FOLDER = "tensorboard"


class TensorBoardSink:
    """Writes the scalars of rank 0's events; needs the package ``tensorboard``, not torch."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2  # noqa: PLC0415  (an extra)
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415

        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        self._writer: Any = EventFileWriter(str(run_dir / FOLDER))

    def feed(self, event: Event) -> None:
        """Take in one event."""
        if scalars := scalars_of(event):
            values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
            summary = self._summary(value=values)
            self._writer.add_event(self._event(wall_time=event["time"], step=event["step"], summary=summary))

    def close(self) -> None:
        """Flush what is buffered."""
        self._writer.close()
