"""What goes to standard output and what to standard error.

With ``--json`` standard output holds one object and nothing else; people read standard error. Without it,
results are on standard output and progress on standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
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


class Output:
    """Prints for people or for programs."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.errors = _console(stderr=True)
        self._people = self.errors if as_json else _console(stderr=False)

    def print(self, text: str = "") -> None:
        """A line for people."""
        self._people.print(text)

    @property
    def width(self) -> int:
        """Characters in a line for people."""
        return self._people.width

    def draw(self, line: Text) -> None:
        """A line with colours, which only a terminal gets; what does not fit is not folded."""
        self._people.print(line, overflow="crop", no_wrap=True, crop=True)

    def warn(self, text: str) -> None:
        """A warning, on standard error."""
        self.errors.print(f"warning: {text}")

    def table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str] = ()
    ) -> None:
        """A table for people; columns after the first are aligned right where they hold numbers.

        Args:
            title: Above it.
            columns: Its headings.
            rows: Its cells.
            spare: Columns that are left out, in this order, where the terminal is too narrow for all; such a
                table never breaks a cell.
        """
        columns, rows, left_out = self._fitting(columns, rows, spare)
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for index, column in enumerate(columns):
            numeric = bool(rows) and all(
                r[index][:1].isdigit() or r[index][:1] in "-+" for r in rows if r[index]
            )
            table.add_column(
                Text(column), justify="right" if numeric else "left", overflow="fold", no_wrap=bool(spare)
            )
        for row in rows:
            table.add_row(*[Text(cell) for cell in row])
        self._people.print(table)
        if left_out:
            self.print(f"(no room for {', '.join(left_out)})")

    def _fitting(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str]
    ) -> tuple[list[str], list[list[str]], list[str]]:
        """Columns and rows that fit the width, and the columns left out for it."""
        widths = {c: max(map(cell_len, (c, *(row[i] for row in rows)))) for i, c in enumerate(columns)}
        kept, left_out = list(columns), []
        for name in spare:
            if sum(widths[c] + COLUMN_GAP for c in kept) - COLUMN_GAP <= self._people.width:
                break
            kept.remove(name)
            left_out.append(name)
        cells = [[row[i] for i, c in enumerate(columns) if c in kept] for row in rows]
        return kept, cells, left_out

    def result(self, content: dict[str, Any]) -> None:
        """The object of ``--json``; nothing without it."""
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
        """An error, a line a problem, on standard error; as an object too with ``--json``.

        Args:
            error: What went wrong.
            also: Lines that help to mend it.
            run_dir: The folder of the run that failed, if one had begun.
            facts: What else a program may want to know.
        """
        for problem in error.problems:
            self.errors.print(f"error: {problem}")
        for line in also:
            self.errors.print(line)
        content: dict[str, Any] = {
            "status": "error",
            "errors": [p.as_dict() for p in error.problems],
            "notes": list(also),
        }
        content |= {} if run_dir is None else {"run_dir": str(run_dir)}
        self.result({**content, **(facts or {})})


def _console(stderr: bool) -> Console:
    """A console that leaves brackets alone; in a pipe it is wide, so that tables do not fold."""
    console = Console(stderr=stderr, markup=False, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console
