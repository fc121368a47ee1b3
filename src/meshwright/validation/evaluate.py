"""Predicts published runs from model, cluster, framework and layout alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.memory import estimate_memory
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.time.engine import estimate_step
from meshwright.plan.time.rates import Rates, Tables, calibrated_device, merge_rates
from meshwright.validation.fit import Runs, fit_without
from meshwright.validation.published import Case, Row

TABLES = ("tables/published_runs.csv", "tables/measured_runs.csv")
"""Published runs and our own, with their sources."""


@dataclass(frozen=True)
class Outcome:
    """A row with its prediction."""

    row: Row
    reason: str
    """Defaults of blank cells, or why there is no prediction."""
    predicted_step_s: float | None = None
    predicted_memory_bytes: float | None = None

    @property
    def case(self) -> Case | None:
        """The predicted case; None if there is no prediction."""
        return self.row.case if self.predicted_step_s is not None else None

    @property
    def step_error(self) -> float | None:
        """Predicted over measured, less one."""
        return _error(self.predicted_step_s, self.row.step_s)

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured, less one."""
        return _error(self.predicted_memory_bytes, self.row.memory_bytes)

    def as_dict(self) -> dict[str, object]:
        """The row for ``--json``."""
        row = self.row
        return {
            "id": row.id,
            "predicted_step_s": self.predicted_step_s,
            "step_s": row.step_s,
            "predicted_memory_gb": _gigabytes(self.predicted_memory_bytes),
            "memory_gb": _gigabytes(row.memory_bytes),
            "reason": self.reason,
            "expressed": self.case is not None,
            "counted": self.case is not None and self.case.is_counted,
            "source": self.row.source,
        }


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1


def _gigabytes(value: float | None) -> float | None:
    return None if value is None else value / 1e9


def bundled_tables() -> list[Path]:
    """The tables in the package."""
    return [Path(str(resources.files("meshwright.validation").joinpath(name))) for name in TABLES]


def evaluate(rows: Sequence[Row], rates: Mapping[str, Tables] | None = None) -> list[Outcome]:
    """Rows with predictions, in order; rows of one workload are predicted together.

    Args:
        rows: Rows of tables.
        rates: By source of a row; the calibrated ones if left out.
    """
    groups: dict[tuple[Workload, str], list[int]] = defaultdict(list)
    outcomes: dict[int, Outcome] = {}
    for index, row in enumerate(rows):
        if row.case is None:
            outcomes[index] = Outcome(row, row.reason)
        else:
            groups[row.case.workload, row.source if rates else ""].append(index)
    for (workload, source), places in groups.items():
        cases = [case for index in places if (case := rows[index].case)]
        own = merge_rates(rates[source], _section(workload)) if rates else None
        for index, predicted in zip(places, _predict(workload, cases, own), strict=True):
            row = rows[index]
            if isinstance(predicted, str):
                outcomes[index] = Outcome(row, predicted)
            else:
                outcomes[index] = Outcome(row, row.reason, *predicted)
    return [outcomes[index] for index in range(len(rows))]


def _section(workload: Workload) -> str:
    return calibrated_device(workload.cluster.device_name)


def evaluate_left_out(rows: Sequence[Row], others: Sequence[Row] = ()) -> list[Outcome]:
    """Rows with predictions, each with rates that were fitted to the rows of all other sources.

    Args:
        rows: To predict.
        others: More rows to fit to.
    """
    pool = {row.id: row for row in (*others, *rows)}.values()
    runs = Runs([row.case for row in pool if row.case is not None])
    fits = fit_without(runs, sorted({row.source for row in rows}))
    return evaluate(rows, {source: one.tables for source, one in fits.items()})


def _predict(
    workload: Workload, cases: Sequence[Case], rates: Rates | None
) -> list[tuple[float, float] | str]:
    """Step seconds and memory bytes of each case, or the reason why there are none."""
    grid = Grid.of([case.layout for case in cases])
    step, memory = estimate_step(workload, grid, rates), estimate_memory(workload, grid)
    found: list[tuple[float, float] | str] = []
    for index, case in enumerate(cases):
        values = float(step.step_s[index]), float(memory.counted_as(case.memory_kind)[index])
        usable = all(math.isfinite(value) and value > 0 for value in values)
        found.append(values if usable else "the estimate gives no finite figure")
    return found
