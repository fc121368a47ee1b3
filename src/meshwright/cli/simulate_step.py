"""``meshwright simulate step``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.api import load_job, write_trace
from meshwright.cli.output import Output
from meshwright.cli.reporter import ConsoleReporter
from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_plural, format_seconds
from meshwright.layout.text import describe_layout
from meshwright.report.figure import require_picture
from meshwright.report.step_plot import draw_step
from meshwright.report.step_table import name_lane, step_cells

if TYPE_CHECKING:
    from meshwright.results import StepTimeline

MOST_LANES = 16
"""Lanes in the table; of more, the first and the last ones."""


@dataclass(frozen=True)
class StepRequest:
    """The arguments of the command."""

    source: str
    overrides: tuple[str, ...]
    on: str | None
    pp_ranks: str | None
    trace: Path | None
    out: Path | None


def simulate_step(output: Output, request: StepRequest) -> int:
    """Plan, simulate, print the parts of each pp rank, and write the picture and the trace."""
    if request.out is not None:
        require_picture(request.out)
    job = load_job(request.source, *request.overrides, on=request.on)
    timeline = job.simulate_step(reporter=ConsoleReporter(output))
    chosen = parse_ranks(request.pp_ranks, len(timeline.pp_ranks))
    if request.trace is not None:
        write_trace(timeline, request.trace, chosen)
    if request.out is not None:
        draw_step(timeline, request.out, chosen)
    _show(output, timeline)
    files = {"trace": request.trace, "picture": request.out}
    for name, path in files.items():
        if path is not None:
            output.print(f"{name}: {path}")
    output.result(
        timeline.as_dict() | {name: None if path is None else str(path) for name, path in files.items()}
    )
    return 0


def parse_ranks(text: str | None, count: int) -> list[int] | None:
    """Pipeline ranks from a text such as ``0,3``; None for all.

    Raises:
        UserError: The text is not a list of pipeline ranks.
    """
    if text is None:
        return None
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [-1]
    if not all(0 <= rank < count for rank in found):
        known = "the layout has only pp rank 0" if count == 1 else f"the layout has pp ranks 0 to {count - 1}"
        rule = f"is not a list of pp ranks: {known}"
        fix = "Leave it out, or use --pp-ranks 0" if count == 1 else f"Write, for example, 0,{count - 1}"
        raise UserError(Problem("simulate-pp-ranks", rule, path="--pp-ranks", value=text, fix=fix))
    return found


def _show(output: Output, timeline: StepTimeline) -> None:
    plan = timeline.plan
    micro_batches = format_plural(plan.micro_batches, "micro-batch", "es")
    each = f"{plan.world_size // len(timeline.pp_ranks)} identical ranks per row"
    output.print(f"{plan.job.name}, {describe_layout(plan.job.layout)}: {micro_batches}, {each}")
    ranks = [*timeline.pp_ranks]
    shown = ranks if len(ranks) <= MOST_LANES else [*ranks[: MOST_LANES // 2], *ranks[-MOST_LANES // 2 :]]
    lanes = [timeline.lane(rank) for rank in shown]
    columns, rows = step_cells(timeline, lanes)
    output.table("Simulated step", columns, rows)
    if len(shown) < len(ranks):
        output.print(f"({len(ranks) - len(shown)} pp ranks between them are left out; --json has all)")
    overlapped = lanes[0].overlapped_totals()
    if overlapped:
        found = ", ".join(f"{axis} {format_seconds(seconds)}" for axis, seconds in overlapped.items())
        output.print(f"overlapped with compute, {name_lane(timeline, shown[0])}: {found}")
    if timeline.schedule is None and plan.job.layout.pp > 1:
        output.print("the schedule is too large to simulate: an average rank, with the plan's closed form")
    output.print(
        f"step {format_seconds(timeline.step_s)}, as planned"
        + (f"; bubble {timeline.bubble:.1%} of all pipeline ranks' time" if timeline.schedule else "")
    )
