"""Regenerates the files that depend on published runs, after a change of the formulas or the calibration.

    .venv/bin/python benchmarks/validation.py          # writes
    .venv/bin/python benchmarks/validation.py --check  # only compares; exit status 1 if something is stale

Two files: ``src/meshwright/plan/time/residuals.toml`` (basis of the intervals) and
``tests/golden/validate.json`` (figures of each family). Both come from the rows in the package.
``make docs-figures`` writes the table in ``docs/validate.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from meshwright.plan.time.interval import similar_groups
from meshwright.validation.evaluate import Outcome, bundled_table, evaluate_tables
from meshwright.validation.metrics import errors_of, summarise_families

ROOT = Path(__file__).parents[1]
RESIDUALS = ROOT / "src" / "meshwright" / "plan" / "time" / "residuals.toml"
GOLDEN = ROOT / "tests" / "golden" / "validate.json"
DIGITS = 5
"""Digits of a figure in the golden table."""
FEWEST_ROWS = 8
"""Rows that a group needs to have its own percentiles."""
LOW, HIGH = 10, 90
"""Percentiles of measured over predicted step time that an interval spans."""


def tabulate_residuals(outcomes: Sequence[Outcome]) -> list[dict[str, str | int | float]]:
    """One entry for each group of similar rows that is large enough, and one for all rows."""
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


def residuals_text(outcomes: Sequence[Outcome]) -> str:
    """The table of residuals as TOML."""
    head = (
        "# Percentiles 10 and 90 of measured over predicted step time, on held-out rows that gate.\n"
        "# Written by benchmarks/validation.py; an empty word means any.\n"
    )
    return head + tomli_w.dumps({"groups": tabulate_residuals(outcomes)})


def golden_figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Figures of each family and of all rows, rounded."""
    gating = [outcome for outcome in outcomes if outcome.case and outcome.case.gates]
    totals = {
        "fit": errors_of([outcome for outcome in gating if not outcome.held_out]),
        "held_out": errors_of([outcome for outcome in gating if outcome.held_out]),
    }
    rounded = _rounded({"families": summarise_families(outcomes), "totals": totals})
    assert isinstance(rounded, dict), "rounding keeps the type"
    return rounded


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return round(value, DIGITS) if isinstance(value, float) else value


def wanted_files() -> dict[Path, str]:
    """The files and their expected content."""
    outcomes = evaluate_tables([bundled_table()])
    figures = golden_figures(outcomes)
    return {
        RESIDUALS: residuals_text(outcomes),
        GOLDEN: json.dumps(figures, indent=1) + "\n",
    }


def main() -> int:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if a file is stale"
    )
    check = parser.parse_args().check
    stale = 0
    for path, text in wanted_files().items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        print(f"{'stale' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
