"""Published layouts that ran out of memory, against layouts of the same sources that ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.memory import estimate_memory
from meshwright.validation.published import (
    REQUIRED_COLUMNS,
    Case,
    Row,
    ran_out_of_memory,
    read_row,
    read_table,
)

TABLE = "tables/published_oom.csv"
"""Layouts that ran out of memory, with their sources."""


@dataclass(frozen=True)
class SourceLimits:
    """Layouts of one source, and whether their memory is predicted to suffice."""

    source: str
    failed: int
    """Layouts that ran out of memory."""
    caught: int
    """Those of them that are predicted not to fit."""
    ran: int
    fitting: int
    """Those of them that are predicted to fit."""


@dataclass(frozen=True)
class Limits:
    """All sources with layouts of both kinds."""

    sources: list[SourceLimits]
    not_expressed: int

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``: shares by class and their mean (balanced accuracy)."""
        failed, ran = sum(one.failed for one in self.sources), sum(one.ran for one in self.sources)
        caught = sum(one.caught for one in self.sources) / failed if failed else None
        fitting = sum(one.fitting for one in self.sources) / ran if ran else None
        both = None if caught is None or fitting is None else (caught + fitting) / 2
        return {
            "failed": failed,
            "caught": caught,
            "ran": ran,
            "fitting": fitting,
            "balanced_accuracy": both,
            "not_expressed": self.not_expressed,
            "sources": [vars(one) for one in self.sources],
        }


def read_failed(path: Path | None = None) -> list[Row]:
    """The rows of layouts that ran out of memory, of the package's table or of another.

    Raises:
        UserError: The file is not such a table.
    """
    where = path or Path(str(resources.files("meshwright.validation").joinpath(TABLE)))
    table = read_table(where, REQUIRED_COLUMNS, "docs/validate.md")
    return [read_row(number, cells) for number, cells in table if ran_out_of_memory(cells)]


def judge_limits(failed: Sequence[Row], ran: Sequence[Row]) -> Limits:
    """Predict whether layouts fit: of each source with layouts that failed and layouts that ran."""
    found = []
    lost = [row for row in failed if row.case is None]
    for source in sorted({row.source for row in failed} & {row.source for row in ran}):
        bad = [row.case for row in failed if row.source == source and row.case is not None]
        good = [
            row.case for row in ran if row.source == source and row.case is not None and row.case.is_counted
        ]
        if bad and good:
            caught, fitting = sum(not fits(case) for case in bad), sum(fits(case) for case in good)
            found.append(SourceLimits(source, len(bad), caught, len(good), fitting))
    return Limits(found, len(lost))


def fits(case: Case) -> bool:
    """Whether the layout is predicted to fit."""
    return bool(estimate_memory(case.workload, Grid.of([case.layout])).fits(case.workload)[0])
