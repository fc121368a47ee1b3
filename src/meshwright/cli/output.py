"""What goes to standard output and what to standard error.

With ``--json`` standard output holds one object and nothing else; people read standard error. Without it,
results are on standard output and progress on standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.core.errors import MeshwrightError
from meshwright.core.events import to_json

PIPE_WIDTH = 140


class Output:
    """Prints for people or for programs."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.errors = _console(stderr=True)
        self._people = self.errors if as_json else _console(stderr=False)

    def say(self, text: str = "") -> None:
        """A line for people."""
        self._people.print(text)

    def warn(self, text: str) -> None:
        """A warning, on standard error."""
        self.errors.print(f"warning: {text}")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table for people; columns after the first are aligned right where they hold numbers."""
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for index, column in enumerate(columns):
            numeric = bool(rows) and all(
                r[index][:1].isdigit() or r[index][:1] in "-+" for r in rows if r[index]
            )
            table.add_column(Text(column), justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*[Text(cell) for cell in row])
        self._people.print(table)

    def result(self, content: dict[str, Any]) -> None:
        """The object of ``--json``; nothing without it."""
        if self.as_json:
            sys.stdout.write(to_json(content) + "\n")
            sys.stdout.flush()

    def failure(self, error: MeshwrightError, also: Sequence[str] = ()) -> None:
        """An error, a line a problem, on standard error; as an object too with ``--json``."""
        for problem in error.problems:
            self.errors.print(f"error: {problem}")
        for line in also:
            self.errors.print(line)
        self.result({"status": "error", "errors": [p.as_dict() for p in error.problems], "notes": list(also)})


def _console(stderr: bool) -> Console:
    """A console that leaves brackets alone; in a pipe it is wide, so that tables do not fold."""
    console = Console(stderr=stderr, markup=False, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console
