"""The reporter: receives messages, progress and events of long-running calls. The default reports nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from meshwright.core.events import Event
from meshwright.report.event_text import EventText

if TYPE_CHECKING:
    from meshwright.plan.contract import PlanContract
    from meshwright.spec.job import Job


class Reporter:
    """Receives messages, progress and events of a call.

    Pass ``log=print`` for lines of text, ``on_event`` for the events of the ranks; subclass it for more. The
    command line does, to draw progress bars.
    """

    def __init__(
        self, log: Callable[[str], None] | None = None, on_event: Callable[[Event], None] | None = None
    ) -> None:
        self._log, self._on_event = log, on_event
        self._text: EventText | None = None

    def message(self, text: str) -> None:
        """A line of the result."""
        if self._log is not None:
            self._log(text)

    def detail(self, text: str) -> None:
        """A line that is shown only in verbose mode."""
        self.message(text)

    def progress(self, text: str) -> None:
        """A line about what is being done."""
        self.message(text)

    def warning(self, text: str) -> None:
        """A warning."""
        self.message(f"warning: {text}")

    def planned(self, plan: PlanContract) -> None:
        """The plan of a run is ready; nothing has been started."""
        for reason in plan.reasons:
            self.message(reason)

    def event(self, event: Event) -> None:
        """An event of a rank."""
        if self._on_event is not None:
            self._on_event(event)
        if self._text is not None and (line := self._text.log_line(event)):
            self.message(line)

    @contextmanager
    def training(self, job: Job) -> Iterator[None]:
        """Context of a training run, during which its events arrive."""
        self._text = EventText(job)
        try:
            yield
        finally:
            self._text = None

    @contextmanager
    def activity(self, text: str) -> Iterator[Callable[[str], None]]:
        """Context of a long activity; yields a function that takes its newest state."""
        yield lambda text: None

    @contextmanager
    def bar(self, total: int) -> Iterator[Callable[[str, int], None]]:
        """Context of an activity with a known number of steps; yields a function of text and steps done."""
        yield lambda text, done: None

    @contextmanager
    def search(self) -> Iterator[Callable[[int, int], None]]:
        """Context of the planner's search; yields a function of layouts done and layouts in all."""
        yield lambda done, total: None


SILENT = Reporter()
