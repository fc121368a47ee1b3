"""Prints to standard output and standard error.

With ``--json``, standard output holds one object and nothing else; all text goes to standard error. Without
it, results go to standard output and progress to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.core.errors import MeshwrightError
from meshwright.core.events import to_json

PIPE_WIDTH = 140
COLUMN_GAP = 2
"""Spaces between columns."""


class Verbosity(IntEnum):
    """How much a command prints."""

    quiet = 0
    """Warnings, errors and the result."""
    normal = 1
    verbose = 2
    """All tables."""


class Output:
    """Prints text for people, or one JSON object for programs."""

    def __init__(self, as_json: bool, verbosity: Verbosity = Verbosity.normal) -> None:
        self.as_json, self.verbosity = as_json, verbosity
        self.errors = _console(stderr=True)
        self._people = self.errors if as_json else _console(stderr=False)

    def print(self, text: str = "") -> None:
        """Print a line of text."""
        self._people.print(text)

    @property
    def width(self) -> int:
        """Width of the console in characters."""
        return self._people.width

    def draw(self, line: Text) -> None:
        """Print a coloured line; too long lines are cropped, not wrapped."""
        self._people.print(line, overflow="crop", no_wrap=True, crop=True)

    def warn(self, text: str) -> None:
        """Print a warning on standard error."""
        self.errors.print(f"warning: {text}")

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        optional_columns: Sequence[str] = (),
    ) -> None:
        """Print a table; columns of numbers are right-aligned.

        Args:
            title: Its title.
            columns: Its headings.
            rows: Its cells.
            optional_columns: Columns to leave out, in this order, if the terminal is too narrow; cells then
                do not wrap.
        """
        columns, rows, left_out = self._fitting(columns, rows, optional_columns)
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for index, column in enumerate(columns):
            numeric = bool(rows) and all(
                r[index][:1].isdigit() or r[index][:1] in "-+" for r in rows if r[index]
            )
            table.add_column(
                Text(column),
                justify="right" if numeric else "left",
                overflow="fold",
                no_wrap=bool(optional_columns),
            )
        for row in rows:
            table.add_row(*[Text(cell) for cell in row])
        self._people.print(table)
        if left_out:
            self.print(f"(terminal too narrow for {', '.join(left_out)})")

    def _fitting(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], optional_columns: Sequence[str]
    ) -> tuple[list[str], list[list[str]], list[str]]:
        """Columns and rows that fit the width, and the columns left out."""
        widths = {c: max(map(cell_len, (c, *(row[i] for row in rows)))) for i, c in enumerate(columns)}
        kept, left_out = list(columns), []
        for name in optional_columns:
            if sum(widths[c] + COLUMN_GAP for c in kept) - COLUMN_GAP <= self._people.width:
                break
            kept.remove(name)
            left_out.append(name)
        cells = [[row[i] for i, c in enumerate(columns) if c in kept] for row in rows]
        return kept, cells, left_out

    def result(self, content: dict[str, Any]) -> None:
        """Print the JSON object, with ``--json`` only."""
        if self.as_json:
            sys.stdout.write(to_json(content) + "\n")
            sys.stdout.flush()

    def failure(
        self,
        error: MeshwrightError,
        also: Sequence[str] = (),
        run_dir: Path | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Print an error, one line per problem, on standard error; with ``--json`` also as an object.

        Args:
            error: What went wrong.
            also: Further lines.
            run_dir: Folder of the run, if one was started.
            facts: Further keys of the object.
        """
        problems = [problem.as_option() for problem in error.problems]
        for problem in problems:
            self.errors.print(f"error: {problem}")
        for line in also:
            self.errors.print(line)
        content: dict[str, Any] = {
            "status": "error",
            "errors": [p.as_dict() for p in problems],
            "notes": list(also),
        }
        content |= {} if run_dir is None else {"run_dir": str(run_dir)}
        self.result({**content, **(facts or {})})


def _console(stderr: bool) -> Console:
    """A console without markup; wide in a pipe, so that tables do not wrap."""
    console = Console(stderr=stderr, markup=False, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console
