"""``meshwright bench scaling`` and ``bench collectives``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.api import bench_collectives, load_job
from meshwright.cli.options import read_size
from meshwright.cli.output import Output
from meshwright.cli.reporter import ConsoleReporter
from meshwright.core.errors import Problem, UserError
from meshwright.core.files import can_write
from meshwright.core.units import format_bytes, format_count, format_seconds
from meshwright.report.figure import require_picture, save_figure
from meshwright.report.plot import draw_chart
from meshwright.report.scaling import ScalingRow
from meshwright.report.text_plot import draw_text

if TYPE_CHECKING:
    from meshwright.results import CollectiveBench, ScalingResult


@dataclass(frozen=True)
class CollectivesRequest:
    """A benchmark of collectives as given on the command line."""

    ranks: int | None
    ops: str | None
    algorithms: str | None
    sizes: str | None
    budget_s: float
    cpu: bool


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
    _require_writable(out)
    require_picture(out)
    job = load_job(source, *overrides)
    result = job.bench_scaling(ranks=chosen, steps=steps, weak=weak, reporter=ConsoleReporter(output))
    _show(output, result, out)
    output.result({**result.as_dict(), "plot": str(out)})
    return 0


def show_collectives(output: Output, request: CollectivesRequest, out: Path | None) -> int:
    """Measure collectives, and print their times, and latency and bandwidth of each curve."""
    if out is not None:
        _require_writable(out)
        require_picture(out)
    result = bench_collectives(
        ranks=request.ranks,
        ops=_split(request.ops),
        algorithms=None if request.algorithms is None else _split(request.algorithms),
        sizes=[read_size("--sizes", text) for text in _split(request.sizes)],
        budget_s=request.budget_s,
        cpu=request.cpu,
        reporter=ConsoleReporter(output),
    )
    _show_collectives(output, result)
    if out is not None:
        result.draw(out)
        output.print(f"picture: {out}")
    output.result(result.as_dict() | {"picture": None if out is None else str(out)})
    return 0


def _split(text: str | None) -> list[str]:
    return [] if text is None else [part.strip() for part in text.split(",")]


def _require_writable(out: Path) -> None:
    """Before minutes are spent on measuring."""
    if not can_write(out):
        rule, fix = "cannot be written", "Choose another file"
        raise UserError(Problem("bench-not-writable", rule, path=str(out), fix=fix))


def _show_collectives(output: Output, result: CollectiveBench) -> None:
    ranks, transports = result.machine["ranks"], {row.transport for row in result.rows}
    for op in dict.fromkeys(row.op for row in result.rows):
        curves = [curve for curve in result.curves if curve.rows[0].op == op]
        sizes = sorted({row.bytes for curve in curves for row in curve.rows})
        times = {(curve.name, row.bytes): row for curve in curves for row in curve.rows}
        # Every algorithm has one transport, except the backend's.
        names = [curve.name if transports != {"nccl"} else curve.rows[0].algorithm for curve in curves]
        cells = [[times.get((curve.name, size)) for curve in curves] for size in sizes]
        output.table(
            f"{op}, {ranks} ranks: time",
            ("size", *names),
            [
                (format_bytes(size), *("" if row is None else format_seconds(row.time_s) for row in rows))
                for size, rows in zip(sizes, cells, strict=True)
            ],
        )
        output.print()
    fitted = [curve for curve in result.curves if curve.alpha_s is not None]
    output.table(
        "Latency and bandwidth (time = alpha + bytes x beta)",
        ("op", "algorithm", "transport", "alpha", "1 / beta", "best bus bandwidth", "worst error of the fit"),
        [
            (
                curve.rows[0].op,
                curve.rows[0].algorithm,
                curve.rows[0].transport,
                format_seconds(curve.alpha_s or 0.0),
                f"{format_bytes(1 / curve.beta_s_per_byte)}/s" if curve.beta_s_per_byte else "-",
                f"{format_bytes(max(row.busbw_bytes_per_s for row in curve.rows))}/s",
                "too few sizes" if curve.worst_error is None else f"{curve.worst_error:.0%}",
            )
            for curve in fitted
        ],
    )
    if "shm" in transports:
        output.print("shm: the shared-memory transport (train.transport=shared_memory)")
    machine = result.machine
    output.print(
        f"{machine['cores']} cores of {machine['processor']}, load {machine['load']:.1f}; "
        "time of the slowest rank, median over the rounds"
    )


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
