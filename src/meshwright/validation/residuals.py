"""Residuals of left-out sources: the basis of predicted intervals.

A group of similar rows has its own percentiles if it has at least FEWEST_ROWS rows of FEWEST_SOURCES sources.
Every source weighs the same, however many rows it has: an interval is for a source that is not in the table.
The fewer the sources, the more rows of a new source are outside plain percentiles. So the tails that are cut
off are smaller by (sources - 1) / (sources + 1).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.plan.time.interval import Key, Residuals, interval, similar_groups
from meshwright.validation.evaluate import Outcome

FEWEST_ROWS = 8
FEWEST_SOURCES = 3
TAIL = 0.1
"""Share of rows of a new source that may be on each side of an interval."""
DIGITS = 3


def tabulate_residuals(outcomes: Sequence[Outcome]) -> Residuals:
    """Percentiles of each group of similar rows that is large enough, and of all rows."""
    groups: dict[Key, list[tuple[str, float]]] = defaultdict(list)
    for outcome in outcomes:
        case, error = outcome.case, outcome.step_error
        if case is None or error is None or not case.is_counted:
            continue
        for key in similar_groups(case.workload):
            groups[key].append((case.source, 1 / (1 + error)))
    table: Residuals = {}
    for key, rows in sorted(groups.items()):
        counts = Counter(source for source, _ in rows)
        if any(key) and (len(rows) < FEWEST_ROWS or len(counts) < FEWEST_SOURCES):
            continue
        weights = np.array([1 / counts[source] for source, _ in rows])
        tail = TAIL * (len(counts) - 1) / (len(counts) + 1)
        low, high = weighted_quantiles(np.array([ratio for _, ratio in rows]), weights, (tail, 1 - tail))
        table[key] = (len(rows), round(low, DIGITS), round(high, DIGITS))
    return table


def weighted_quantiles(
    values: np.ndarray[Any, Any], weights: np.ndarray[Any, Any], levels: Sequence[float]
) -> list[float]:
    """Quantiles of weighted values, interpolated between the middles of their weights."""
    order = np.argsort(values)
    middle = np.cumsum(weights[order]) - weights[order] / 2
    return [float(np.interp(level, middle / weights.sum(), values[order])) for level in levels]


def plan_interval_cover(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """How many rows are within the interval that a plan would have, and its half-width."""
    counted = [one for one in outcomes if one.case and one.case.is_counted and one.step_error is not None]
    found = [(one, interval(one.case.workload)) for one in counted if one.case]
    return _cover(
        [own.low <= 1 / (1 + (one.step_error or 0.0)) <= own.high for one, own in found],
        [(own.high - own.low) / 2 for _, own in found],
    )


def interval_cover(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """How many rows are within an interval from the residuals of all other sources, and its half-width."""
    counted = [one for one in outcomes if one.case and one.case.is_counted and one.step_error is not None]
    inside, widths = [], []
    for source in sorted({one.row.source for one in counted}):
        table = tabulate_residuals([one for one in counted if one.row.source != source])
        for one in counted:
            if one.row.source != source or one.case is None or not table:
                continue
            found = interval(one.case.workload, table)
            inside.append(found.low <= 1 / (1 + (one.step_error or 0.0)) <= found.high)
            widths.append((found.high - found.low) / 2)
    return _cover(inside, widths)


def _cover(inside: Sequence[bool], widths: Sequence[float]) -> dict[str, Any]:
    if not inside:
        return {"rows": 0, "share": None, "half_width": None}
    return {
        "rows": len(inside),
        "share": float(np.mean(inside)),
        "half_width": float(np.median(widths)),
    }
