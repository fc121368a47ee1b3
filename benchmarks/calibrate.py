"""Fits the rates of ``plan/time/calibration.toml`` to the runs in the package, and prints them.

The fit is that of ``validation/fit.py``: few rates, each of a device or a kernel class, regularised towards
priors from data sheets. ``meshwright validate --leave-one-source-out`` judges it.

    python benchmarks/calibrate.py             # prints priors, fitted rates and errors
    python benchmarks/calibrate.py --write     # also writes calibration.toml
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from meshwright.plan.time.rates import Tables
from meshwright.validation.evaluate import bundled_tables
from meshwright.validation.fit import FITTED, PRIORS, Fit, Runs, fit
from meshwright.validation.published import read_rows

CALIBRATION = Path(__file__).parents[1] / "src/meshwright/plan/time/calibration.toml"


def text(tables: Tables) -> str:
    """The calibration file."""
    lines = [
        "# Rates of kernel classes and links. Written by benchmarks/calibrate.py from measured runs;",
        "# plan/time/rates.py says what each is. A device's section overrides the defaults.",
    ]
    for section in sorted(tables, key=lambda name: (name != "default", name)):
        lines.append(f"\n[{section}]" if "." not in section else f'\n["{section}"]')
        lines += [f"{name} = {value:.4g}" for name, value in tables[section].items()]
    return "\n".join(lines) + "\n"


def report(found: Fit, runs: Runs) -> str:
    """The fitted rates, how many rows depend on each, and the mean error."""
    tables = found.tables
    lines = [f"{'rate':28} {'prior':>9} {'fitted':>9} {'rows':>5}"]
    for section, name in FITTED:
        prior = PRIORS.get(section, {}).get(name, PRIORS["default"][name])
        rows = found.rows[section, name]
        lines.append(f"{section + ' ' + name:28} {prior:9.4g} {tables[section][name]:9.4g} {rows:5}")
    errors = np.abs(np.expm1(runs.log_errors([tables])[0]))
    lines.append(f"mean error of the {len(errors)} fitted rows: {errors.mean():.1%}")
    return "\n".join(lines)


def main() -> None:
    """Fit, print, write on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write calibration.toml")
    write = parser.parse_args().write
    rows = [row for table in bundled_tables() for row in read_rows(table)]
    runs = Runs([row.case for row in rows if row.case is not None])
    found = fit(runs)
    print(report(found, runs))
    if write:
        CALIBRATION.write_text(text(found.tables), encoding="utf-8")


if __name__ == "__main__":
    main()
