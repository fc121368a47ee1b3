"""What intervals rest on: residuals of held-out rows, by kind of model, framework and device.

The table is made by ``benchmarks/validation.py`` and kept in ``data/residuals.toml``: planning reads a few
lines and predicts no published row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from meshwright.plan.time.interval import FEWEST_ROWS, similar_groups
from meshwright.validation.evaluate import Outcome

LOW, HIGH = 10, 90
"""Percentiles of measured over predicted that an interval reaches to."""


def tabulate_residuals(outcomes: Sequence[Outcome]) -> list[dict[str, str | int | float]]:
    """One entry for each group of similar rows that is large enough, and one for all of them."""
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for outcome in outcomes:
        case, error = outcome.case, outcome.step_error
        if case is None or error is None or not (case.gates and outcome.held_out):
            continue
        for key in similar_groups(case.workload):
            groups[key].append(1 / (1 + error))
    table: list[dict[str, str | int | float]] = []
    for (kind, profile, device), ratios in sorted(groups.items()):
        if len(ratios) < FEWEST_ROWS and (kind or profile or device):
            continue
        low, high = np.percentile(ratios, [LOW, HIGH])
        table.append(
            {
                "kind": kind,
                "profile": profile,
                "device": device,
                "rows": len(ratios),
                "low": round(float(low), 3),
                "high": round(float(high), 3),
            }
        )
    return table
