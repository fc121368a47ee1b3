"""Regenerates the files that depend on published runs, after a change of the formulas or the calibration.

    .venv/bin/python benchmarks/validation.py          # writes
    .venv/bin/python benchmarks/validation.py --check  # only compares; exit status 1 if something is stale

Two files: ``src/meshwright/plan/time/residuals.toml`` (basis of the intervals) and
``tests/golden/validate.json`` (figures of each family, with the rates in the package). Both come from the
rows in the package.
``make docs-figures`` writes the table in ``docs/validate.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from meshwright.validation.evaluate import Outcome, bundled_tables, evaluate, evaluate_left_out
from meshwright.validation.metrics import Validation, summarize_families
from meshwright.validation.published import Row, read_rows
from meshwright.validation.residuals import tabulate_residuals

ROOT = Path(__file__).parents[1]
RESIDUALS = ROOT / "src" / "meshwright" / "plan" / "time" / "residuals.toml"
GOLDEN = ROOT / "tests" / "golden" / "validate.json"
DIGITS = 5
"""Digits of a figure in the golden table."""


def read_bundled() -> list[Row]:
    """The rows in the package."""
    return [row for table in bundled_tables() for row in read_rows(table)]


def residuals_text(left_out: Sequence[Outcome]) -> str:
    """The table of residuals as TOML."""
    head = (
        "# Measured over predicted step time of 80% of the rows of a new source, from rows that gate, each\n"
        "# predicted with rates fitted without its source (validation/residuals.py). Written by\n"
        "# benchmarks/validation.py; an empty word means any.\n"
    )
    groups = [
        {"kind": kind, "profile": profile, "device": device, "rows": rows, "low": low, "high": high}
        for (kind, profile, device), (rows, low, high) in tabulate_residuals(left_out).items()
    ]
    return head + tomli_w.dumps({"groups": groups})


def golden_figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Figures of each family and of all rows, rounded."""
    totals = {name: part for name, part in Validation(list(outcomes)).totals.items() if name != "interval"}
    rounded = _rounded({"families": summarize_families(outcomes), "totals": totals})
    assert isinstance(rounded, dict), "rounding keeps the type"
    return rounded


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return round(value, DIGITS) if isinstance(value, float) else value


def wanted_files() -> dict[Path, str]:
    """The files and their expected content."""
    rows = read_bundled()
    return {
        RESIDUALS: residuals_text(evaluate_left_out(rows)),
        GOLDEN: json.dumps(golden_figures(evaluate(rows)), indent=1) + "\n",
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
