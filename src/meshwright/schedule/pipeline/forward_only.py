"""The order of an evaluation: forward passes only, through the stages of a schedule that trains."""

from __future__ import annotations

from dataclasses import replace

from meshwright.schedule.pipeline.actions import Action, Kind, PipelineSchedule


def order_forward(schedule: PipelineSchedule, micro_batches: int | None = None) -> PipelineSchedule:
    """A schedule with the same stages on the same ranks, and nothing but forward passes.

    Every rank goes along the same wave: by stage + micro-batch, and of one front the later stage first, whose
    micro-batch is nearer to its end. What a pass needs lies one front before it, so no rank waits for ever,
    wherever the stages are.

    Args:
        schedule: Whose stages are meant.
        micro_batches: To run; as many as the schedule has if left out.
    """
    count = schedule.micro_batches if micro_batches is None else micro_batches
    rows = []
    for rank in range(schedule.pp):
        passes = [Action(Kind.FORWARD, stage, m) for stage in schedule.stages_of(rank) for m in range(count)]
        rows.append(tuple(sorted(passes, key=lambda a: (a.stage + a.micro_batch, -a.stage))))
    return replace(schedule, micro_batches=count, ranks=tuple(rows), split_backward=False, forward_only=True)
