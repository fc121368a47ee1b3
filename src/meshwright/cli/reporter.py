"""Reports what a call does on the console: progress bars on a terminal, plain lines in a pipe or a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from meshwright.api import Reporter
from meshwright.cli.output import Output, Verbosity
from meshwright.core.events import Event

if TYPE_CHECKING:
    from meshwright.cli.progress import ProgressView
    from meshwright.results import PlanContract
    from meshwright.spec.job import Job

LONG_SEARCH = 300_000
"""Layouts from which a search has a progress bar, on a terminal."""


class ConsoleReporter(Reporter):
    """Prints through the output of a command."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output
        self._view: ProgressView | None = None

    @property
    def _quiet(self) -> bool:
        return self._output.verbosity == Verbosity.quiet

    def message(self, text: str) -> None:
        """A line of the result."""
        if not self._quiet:
            self._output.print(text)

    def detail(self, text: str) -> None:
        """A line that only ``-v`` prints."""
        if self._output.verbosity == Verbosity.verbose:
            self._output.print(text)

    def progress(self, text: str) -> None:
        """A line about what is being done, on standard error."""
        if not self._quiet:
            self._output.errors.print(text)

    def warning(self, text: str) -> None:
        """A warning, on standard error."""
        self._output.warn(text)

    def planned(self, plan: PlanContract) -> None:
        """Print the plan of the run: two lines, or all of it with ``-v``."""
        if self._output.verbosity == Verbosity.verbose:
            from meshwright.cli.plan_text import describe_plan  # noqa: PLC0415

            describe_plan(self._output, plan, verbose=True)
        elif not self._quiet:
            from meshwright.cli.train_text import summarize_plan  # noqa: PLC0415

            for line in summarize_plan(plan):
                self._output.print(line)

    @contextmanager
    def training(self, job: Job) -> Iterator[None]:
        """Show the progress of the run."""
        from meshwright.cli.progress import ProgressView  # noqa: PLC0415

        if self._quiet:
            yield
            return
        every_line = self._output.verbosity == Verbosity.verbose
        self._view = ProgressView(self._output.errors, job, every_line)
        with self._view.shown():
            yield

    def event(self, event: Event) -> None:
        """Show one event."""
        if self._view is not None:
            self._view.feed(event)

    @contextmanager
    def activity(self, text: str) -> Iterator[Callable[[str], None]]:
        """A spinner on a terminal."""
        with self._output.errors.status(text) as status:
            yield status.update

    @contextmanager
    def bar(self, total: int) -> Iterator[Callable[[str, int], None]]:
        """A bar on a terminal; in a pipe a line for each part that starts."""
        console = self._output.errors
        if not console.is_terminal:
            yield lambda text, done: console.print(text) if text.endswith("starting") else None
            return
        from rich.progress import BarColumn, Progress, TextColumn  # noqa: PLC0415

        with Progress(BarColumn(), TextColumn("{task.description}"), console=console) as bar:
            task = bar.add_task("", total=total)
            yield lambda text, done: bar.update(task, completed=done, description=text)

    @contextmanager
    def search(self) -> Iterator[Callable[[int, int], None]]:
        """A bar for long searches, on a terminal."""
        if not self._output.errors.is_terminal:
            yield lambda done, total: None
            return
        from rich.progress import Progress  # noqa: PLC0415  (most searches are over before it is loaded)

        with Progress(console=self._output.errors, transient=True) as bar:
            task = None

            def show(done: int, total: int) -> None:
                nonlocal task
                if total < LONG_SEARCH:
                    return
                if task is None:
                    task = bar.add_task("searching", total=total)
                bar.update(task, completed=done, total=total)

            yield show
