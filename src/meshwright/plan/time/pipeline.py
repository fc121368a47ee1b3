"""Simulates the pipeline schedule of a step with predicted stage times."""

from __future__ import annotations

import bisect
import functools

import numpy as np

from meshwright.core.errors import UserError
from meshwright.layout.pipeline_schedules import built_schedule, schedule_of
from meshwright.plan.contract import PipelineTime
from meshwright.plan.profiles import PROFILES
from meshwright.schedule.pipeline.actions import Action, PipelineSchedule, producer_of
from meshwright.schedule.pipeline.walk import StageTimes, Walk, walk_schedule
from meshwright.spec.job import Job


def walk_pipeline(job: Job, micro_batches: int, planned: PipelineTime) -> tuple[PipelineSchedule, Walk]:
    """The schedule of a step, and the planned time of each action."""
    schedule = schedule_of(job, micro_batches)
    overlap = PROFILES[job.train.runtime].time.overlap_p2p
    return schedule, walk_schedule(schedule, planned.stage_times, planned.send_s, overlap)


def plan_pipeline(job: Job, micro_batches: int, times: StageTimes, send_s: float) -> PipelineTime | None:
    """Simulate the schedule of a job with a complete layout; None where it is too large to generate.

    Args:
        job: With a complete layout.
        micro_batches: Micro-batches of a step.
        times: Times of the stages.
        send_s: From one stage to the next on another rank.
    """
    forward, inputs, weights = (
        _listed(row) for row in (times.forward_s, times.backward_input_s, times.backward_weight_s)
    )
    overlap = PROFILES[job.train.runtime].time.overlap_p2p
    layout, rows = job.layout, (forward, inputs, weights)
    if layout.schedule_file is not None:
        return _walk(schedule_of(job, micro_batches), rows, send_s, overlap)
    return _walk_named(
        layout.schedule, layout.pp, micro_batches, layout.virtual_stages, rows, send_s, overlap
    )


Rows = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
"""Seconds of each stage's forward pass, input gradients and weight gradients."""


@functools.lru_cache(maxsize=1024)
def _walk_named(
    name: str, pp: int, micro_batches: int, virtual_stages: int, times: Rows, send_s: float, overlap: bool
) -> PipelineTime | None:
    try:
        schedule = built_schedule(name, pp, micro_batches, virtual_stages)
    except UserError:
        return None
    return _walk(schedule, times, send_s, overlap)


def _walk(schedule: PipelineSchedule, times: Rows, send_s: float, overlap: bool) -> PipelineTime:
    walk = walk_schedule(schedule, StageTimes(*times), send_s, overlap)
    work_s = max(walk.work_s)
    exposed_s = min(_sum_transfers(schedule, walk, send_s), walk.makespan_s - work_s)
    return PipelineTime(walk.bubble, walk.makespan_s, work_s, send_s, *times, exposed_s)


def _sum_transfers(schedule: PipelineSchedule, walk: Walk, send_s: float) -> float:
    """Seconds of transfers on the critical path, traced back from the last action.

    An action starts when its rank is free and its input has arrived.
    """
    if not send_s:
        return 0.0
    rank = max(range(schedule.pp), key=lambda r: walk.end_s[r][-1])
    position, total = len(walk.end_s[rank]) - 1, 0.0
    slack = 1e-9 * walk.makespan_s
    while (start := walk.start_s[rank][position]) > 0:
        free = walk.end_s[rank][position - 1] if position else 0.0
        if start - free <= slack:
            position -= 1
            continue
        needed = producer_of(schedule.ranks[rank][position], schedule.stages)
        sent = None if needed is None else _find_producer(schedule, walk, needed, start - send_s, slack)
        if needed is None or sent is None:  # waited for its own send
            total, position = total + start - free, position - 1
            continue
        total, rank, position = total + send_s, schedule.stage_ranks[needed.stage], sent
    return total


def _find_producer(
    schedule: PipelineSchedule, walk: Walk, action: Action, end_s: float, slack: float
) -> int | None:
    """The position of an action on its rank if it ended at this time, else None."""
    rank = schedule.stage_ranks[action.stage]
    for position in range(bisect.bisect_left(walk.end_s[rank], end_s - slack), len(walk.end_s[rank])):
        if walk.end_s[rank][position] > end_s + slack:
            return None
        if schedule.ranks[rank][position] == action:
            return position
    return None


def _listed(times: object) -> tuple[float, ...]:
    return tuple(float(seconds) for seconds in np.atleast_1d(np.asarray(times, dtype=float)))
