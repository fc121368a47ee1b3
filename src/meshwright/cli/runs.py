"""``meshwright runs`` and ``meshwright report``."""

from __future__ import annotations

import time
from pathlib import Path

from meshwright.api import list_runs, load_run
from meshwright.cli.output import Output
from meshwright.core.units import format_bytes, format_throughput
from meshwright.report.event_text import format_loss
from meshwright.report.run_list import RunSummary
from meshwright.report.run_report import RunReport
from meshwright.report.text_plot import draw_text

COLUMNS = (
    "name",
    "status",
    "steps",
    "ranks",
    "loss",
    "held-out",
    "speed",
    "goodput",
    "audit",
    "began",
    "size",
)
OPTIONAL_COLUMNS = ("size", "goodput", "ranks", "began", "speed")
"""Columns that a narrow terminal leaves out, in this order."""


def show_runs(output: Output, folder: Path) -> int:
    """List the runs of a folder."""
    found = list_runs(folder)
    if found:
        output.table(
            f"Runs in {folder}", COLUMNS, [_row(run) for run in found], optional_columns=OPTIONAL_COLUMNS
        )
        for run in found:
            if run.reason:  # too long for a column
                output.print(f"{run.name}: {' '.join(run.reason.split())}")
    else:
        output.print(f"no runs in {folder}")
    output.result({"dir": str(folder), "runs": [run.as_dict() for run in found]})
    return 0


def _row(run: RunSummary) -> tuple[str, ...]:
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.began)) if run.began else "-"
    return (
        run.name,
        run.status,
        f"{run.steps}/{'?' if run.target_steps is None else run.target_steps}",
        "-" if run.ranks is None else str(run.ranks),
        "-" if run.loss is None else format_loss(run.loss),
        "-" if run.eval_loss is None else format_loss(run.eval_loss),
        format_throughput(run.tokens_per_s, run.unit) if run.tokens_per_s else "-",
        "-" if run.goodput is None else f"{run.goodput:.0%}",
        "not measured" if run.measured is False else {True: "ok", False: "differs", None: "-"}[run.audit_ok],
        began,
        format_bytes(run.size_bytes),
    )


def show_report(output: Output, run_dir: Path, out: Path | None) -> int:
    """Print a run's report and write its page."""
    run = load_run(run_dir)
    report, page = run.report(), run.write_page(out)
    describe_report(output, report)
    output.print(f"\npage: {page}")
    output.result({**report.as_dict(), "page": str(page)})
    return 0


def describe_report(output: Output, report: RunReport) -> None:
    """Print the report as text: facts, curves, audit, notes and warnings."""
    output.print(f"{report.run_dir}: {report.status}")
    width = max(len(key) for key, _ in report.facts())
    for key, value in report.facts():
        output.print(f"  {key:<{width}}  {value}")
    for chart in (report.loss_chart(), report.rate_chart()):
        lines = draw_text(chart)
        if lines:
            output.print()
            for line in lines:
                output.print(line)
    restarts = [name for _, name in report.history.restarts()]
    if restarts:
        output.print(f"  {', '.join(restarts)}")
    output.print()
    output.print(report.verdict_text())
    for note in report.notes():
        output.print(f"Note: {note}")
    for warning in report.warnings():
        output.print(f"Warning: {warning}")
