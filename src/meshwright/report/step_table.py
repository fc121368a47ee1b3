"""A simulated step as table rows: one per pp rank and one for the plan, one column per part of the step."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.core.units import format_seconds
from meshwright.simulate.step import AFTER, IDLE, WORK, Lane, StepTimeline


def step_cells(timeline: StepTimeline, lanes: Sequence[Lane]) -> tuple[list[str], list[tuple[str, ...]]]:
    """The columns and the rows; the last column is the sum of the parts."""
    named = [(name_lane(timeline, lane.pp_rank), lane.totals()) for lane in lanes]
    named.append(("plan", timeline.plan.breakdown_s))
    parts = [part for part in (*WORK, *IDLE, *AFTER) if any(part in row for _, row in named)]
    rows = [
        (
            name,
            *(format_seconds(row[part]) if part in row else "" for part in parts),
            format_seconds(sum(row.values())),
        )
        for name, row in named
    ]
    return ["", *parts, "sum"], rows


def name_lane(timeline: StepTimeline, pp_rank: int) -> str:
    """Short name of a lane."""
    return timeline.name_of(pp_rank) if timeline.schedule is None else f"pp rank {pp_rank}"
