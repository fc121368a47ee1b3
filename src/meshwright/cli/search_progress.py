"""A progress bar for searches that take long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from meshwright.cli.output import Output
from meshwright.plan.search.find import Progress, no_progress

LONG_SEARCH = 300_000
"""Layouts from which a bar is shown, on a terminal."""


@contextmanager
def search_progress(output: Output) -> Iterator[Progress]:
    """A bar on standard error for long searches, where there is a terminal."""
    if not output.errors.is_terminal:
        yield no_progress
        return
    from rich.progress import Progress as Bar  # noqa: PLC0415  (most searches are over before it is loaded)

    with Bar(console=output.errors, transient=True) as bar:
        task = None

        def show(done: int, total: int) -> None:
            nonlocal task
            if total < LONG_SEARCH:
                return
            if task is None:
                task = bar.add_task("searching", total=total)
            bar.update(task, completed=done, total=total)

        yield show
