"""``meshwright bench scaling``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.api import load_job
from meshwright.cli.output import Output
from meshwright.cli.reporter import ConsoleReporter
from meshwright.core.errors import Problem, UserError
from meshwright.core.files import can_write
from meshwright.core.units import format_count, format_seconds
from meshwright.report.figure import require_picture, save_figure
from meshwright.report.plot import draw_chart
from meshwright.report.scaling import ScalingRow
from meshwright.report.text_plot import draw_text

if TYPE_CHECKING:
    from meshwright.results import ScalingResult


def bench_scaling(
    output: Output,
    source: str,
    overrides: Sequence[str],
    ranks: str | None,
    steps: int,
    weak: bool,
    out: Path,
) -> int:
    """Measure each number of ranks, and print the table and the picture."""
    chosen = None if ranks is None else parse_ranks(ranks)
    require_picture(out)
    if not can_write(out):  # before minutes are spent on measuring
        rule, fix = "cannot be written", "Choose another file"
        raise UserError(Problem("bench-not-writable", rule, path=str(out), fix=fix))
    job = load_job(source, *overrides)
    result = job.bench_scaling(ranks=chosen, steps=steps, weak=weak, reporter=ConsoleReporter(output))
    _show(output, result, out)
    output.result({**result.as_dict(), "plot": str(out)})
    return 0


def parse_ranks(text: str) -> list[int]:
    """The numbers of ranks in a text such as ``1,2,4``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        rule = "is not a list of numbers of ranks, each 1 or more"
        fix = "Write, for example, 1,2,4"
        raise UserError(Problem("bench-ranks", rule, path="--ranks", value=text, fix=fix))
    return sorted({int(part) for part in parts})


def _show(output: Output, result: ScalingResult, out: Path) -> None:
    job, rows = result.plans[0].job, result.rows
    columns = ("ranks", "batch", job.unit, "micro", "step", "predicted", f"{job.unit}/s", "speed-up")
    output.table("Scaling", (*columns, "efficiency", "audit"), [_cells(row) for row in rows])
    reduced = [_reduction_cells(row) for row in rows if row.overlap is not None]
    if reduced:  # a table of its own: together they would be wider than a terminal
        output.print()
        output.table("Gradient all-reduce", ("ranks", "all-reduce", "exposed", "overlap", "spread"), reduced)
    if shared := [str(row.ranks) for row in rows if row.shared_cores]:
        cores = job.cluster.world_size
        output.print(f"shared cores: {', '.join(shared)} ranks on {cores} cores, less than one core per rank")
    output.print(result.basis)
    output.print()
    chart = result.chart()
    for line in draw_text(chart, columns=48):
        output.print(line)
    save_figure(draw_chart(chart), out)
    output.print(f"\npicture: {out}")


def _cells(row: ScalingRow) -> tuple[str, ...]:
    return (
        str(row.ranks),
        str(row.global_batch),
        format_count(row.tokens_per_step),
        f"{row.micro_batches} x {row.micro_batch}",
        format_seconds(row.step_s),
        format_seconds(row.predicted_step_s),
        format_count(row.tokens_per_s),
        f"{row.speedup:.2f}",
        f"{row.efficiency:.0%}",
        "ok" if row.audit_ok else "differs",
    )


def _reduction_cells(row: ScalingRow) -> tuple[str, ...]:
    return (
        str(row.ranks),
        format_seconds(row.communication_s),
        format_seconds(row.exposed_s),
        f"{row.overlap:.0%}",
        f"{row.overlap_low:.0%} to {row.overlap_high:.0%}",
    )
