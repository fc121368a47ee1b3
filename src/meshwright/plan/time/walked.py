"""The bubble of a pipeline by its schedule itself, generated and walked, in place of the closed form's."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from meshwright.core.errors import UserError
from meshwright.plan.time.engine import StepEstimate
from meshwright.schedule.build import build_schedule
from meshwright.schedule.walk import StageTimes, walk_schedule
from meshwright.spec.layout import Layout

WORK_PARTS = (
    "compute",
    "tensor parallel",
    "context parallel",
    "expert parallel",
    "sharded data parallel",
)
"""Parts of a step that every micro-batch repeats."""


def pass_shares(step: StepEstimate, count: int) -> list[tuple[float, float]]:
    """Shares of forward and input-gradient work in a micro-batch, rounded so that a walk serves many.

    An estimate that does not tell them apart has thirds.
    """
    passes = getattr(step, "passes", None)
    if passes is None:
        return [(1 / 3, 1 / 3)] * count
    total = passes.forward + passes.backward_input + passes.backward_weight
    forward, back = np.round(passes.forward / total, 3), np.round(passes.backward_input / total, 3)
    return [(float(f), float(b)) for f, b in zip(forward, back, strict=True)]


def walked_bubble_s(
    layout: Layout, micro_batches: int, parts: dict[str, float], passes: tuple[float, float]
) -> float | None:
    """The bubble of the schedule itself; None where it is too large to generate."""
    work = sum(parts.get(name, 0.0) for name in WORK_PARTS) / micro_batches
    uneven = parts.get("uneven stages", 0.0) / micro_batches
    if work <= 0:
        return None
    share = _walk(
        layout.schedule, layout.pp, layout.virtual_stages, micro_batches, passes, round(uneven / work, 3)
    )
    return None if share is None else share * work


def even_stage_times(passes: tuple[float, float], uneven: float, stages: int, of_a_rank: int) -> StageTimes:
    """Times of the stages, in units of an average rank's work on one micro-batch."""
    shares = np.array([*passes, 1 - sum(passes)])
    each = np.outer(shares, np.full(stages, 1.0 / of_a_rank))
    each[:, -1] += shares * uneven
    return StageTimes(each[0], each[1], each[2])


@lru_cache(maxsize=1024)
def _walk(
    name: str, pp: int, stages: int, micro_batches: int, passes: tuple[float, float], uneven: float
) -> float | None:
    """Time of a step beyond its slowest rank's work, over one micro-batch's work on an average rank.

    ``passes`` are the shares of forward and input-gradient work. The last stage is slower by ``uneven``, in
    units of an average rank's work.
    """
    try:
        schedule = build_schedule(name, pp, micro_batches, stages)
    except UserError:
        return None
    walk = walk_schedule(schedule, even_stage_times(passes, uneven, schedule.stages, stages))
    return max(0.0, walk.makespan_s - max(walk.work_s))
