"""``meshwright tune``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.api import load_job
from meshwright.cli.output import Output
from meshwright.cli.reporter import ConsoleReporter
from meshwright.core.units import format_bytes, format_count, format_plural, format_seconds
from meshwright.report.tuning import TuneRow

if TYPE_CHECKING:
    from meshwright.results import TuneResult


def tune_job(output: Output, source: str, overrides: Sequence[str], top: int, steps: int, out: Path) -> int:
    """Tune a job's cluster and print predicted and measured times."""
    job = load_job(source, *overrides, to_run=True)
    result = job.tune(out, top=top, steps=steps, reporter=ConsoleReporter(output))
    _show_layouts(output, result)
    _show_fit(output, result)
    output.result(result.as_dict())
    return 0


def _show_layouts(output: Output, result: TuneResult) -> None:
    unit = f"{result.job.unit}/s"
    columns = ("layout", "predicted", "measured", "recalibrated", unit, "predicted peak", "peak", "audit")
    output.table("Layouts, best measured first", columns, [_cells(result, row) for row in result.rows])


def _cells(result: TuneResult, row: TuneRow) -> tuple[str, ...]:
    layout, predicted = row.overrides.replace("layout.", ""), format_seconds(row.plan.step_s)
    predicted_peak, found = format_bytes(row.predicted_peak_bytes), row.measured
    if found is None:
        return layout, predicted, "did not run", "", "", predicted_peak, "", row.reason.splitlines()[0]
    return (
        layout,
        predicted,
        format_seconds(found.step_s),
        format_seconds(result.recalibrated_step_s(row)),
        format_count(found.tokens_per_s),
        predicted_peak,
        "" if found.peak_memory_bytes is None else format_bytes(found.peak_memory_bytes),
        "ok" if found.audit_ok else "differs",
    )


def _show_fit(output: Output, result: TuneResult) -> None:
    layouts, fitted = format_plural(result.candidates, "layout"), result.fitted
    output.print(f"{result.basis}; {len(result.rows)} of {layouts} that run and fit")
    output.print()
    cells = [
        (key, f"{value:.3g}", f"{fitted.after[key]:.3g}", f"{fitted.after[key] / value:.2f}")
        for key, value in fitted.before.items()
    ]
    output.table("Rates of the cluster", ("", "before", "fitted", "ratio"), cells)
    before, after = f"{fitted.error_before:.0%}", f"{fitted.error_after:.0%}"
    output.print(f"mean error of the predictions: {before} before, {after} with the fitted rates")
    output.print(f"\ncluster file: {result.out}; use it with cluster.file={result.out}")
