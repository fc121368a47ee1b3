"""Progress of a run from its events: a bar on a terminal, plain lines in a pipe or a log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn

from meshwright.core.events import Event
from meshwright.report.event_text import EventText
from meshwright.spec.job import Job

WIDE_ENOUGH = 110
"""Columns of a terminal on which a bar fits beside the figures."""


class ProgressView:
    """Shows the events of a run on a console."""

    def __init__(self, console: Console, job: Job, every_line: bool = False) -> None:
        """Show a run.

        Args:
            console: To print on.
            job: That runs.
            every_line: Whether all evaluations and checkpoints get a line of their own.
        """
        self._console, self._text = console, EventText(job, every_line)
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draw the bar inside, on a terminal."""
        if not self._console.is_terminal:
            yield
            return
        columns: list[ProgressColumn] = [TextColumn("{task.description}")]
        if self._console.width >= WIDE_ENOUGH:  # the figures matter more than the bar
            columns.append(BarColumn(bar_width=None))
        with Progress(*columns, console=self._console) as bar:
            self._bar = bar
            self._task = bar.add_task("starting the ranks", total=self._text.steps)
            yield
        self._bar = None

    def feed(self, event: Event) -> None:
        """Show one event."""
        if event["event"] == "step" and self._bar is not None and self._task is not None:
            if text := self._text.describe(event):
                self._bar.update(self._task, completed=event["step"], description=text)
                if pending := self._text.take_pending():  # stays on the screen, above the bar
                    self._console.print(pending)
        elif line := self._text.log_line(event):
            self._console.print(line)
