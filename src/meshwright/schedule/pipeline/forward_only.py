"""The schedule of an evaluation: forward passes only, with the stages of a training schedule."""

from __future__ import annotations

from dataclasses import replace

from meshwright.schedule.pipeline.actions import Action, Kind, PipelineSchedule


def order_forward(schedule: PipelineSchedule, micro_batches: int | None = None) -> PipelineSchedule:
    """A schedule with the same stages on the same ranks, and only forward passes.

    Every rank orders its passes by stage + micro-batch, and at equal sums the later stage first. The input
    of a pass has a sum one lower, so there is no deadlock wherever the stages are.

    Args:
        schedule: With the stages.
        micro_batches: To run; those of the schedule if left out.
    """
    count = schedule.micro_batches if micro_batches is None else micro_batches
    rows = []
    for rank in range(schedule.pp):
        passes = [Action(Kind.FORWARD, stage, m) for stage in schedule.stages_of(rank) for m in range(count)]
        rows.append(tuple(sorted(passes, key=lambda a: (a.stage + a.micro_batch, -a.stage))))
    return replace(schedule, micro_batches=count, ranks=tuple(rows), split_backward=False, forward_only=True)
