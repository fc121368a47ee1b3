"""Every collective that a layout causes, predicted: axis, operation, phase, calls and bytes on one rank."""

from __future__ import annotations

import functools

from meshwright.layout.axes import has_experts
from meshwright.layout.stages import first_alike, schedule_version
from meshwright.plan.traffic.context import predict_context
from meshwright.plan.traffic.ddp import predict_buckets
from meshwright.plan.traffic.expert import predict_experts
from meshwright.plan.traffic.fsdp import predict_groups, predict_row_saves
from meshwright.plan.traffic.pipeline import predict_pipeline
from meshwright.plan.traffic.rows import Traffic, join_places, merge, predict_control
from meshwright.plan.traffic.tensor import predict_tensor
from meshwright.spec.job import Job

__all__ = ["Traffic", "join_places", "predict_traffic"]


def predict_traffic(job: Job, place: int = 0) -> list[Traffic]:
    """All collectives of a rank at one place of the pipelines; none for one process.

    Args:
        job: With its layout settled.
        place: The rank's index on the axis ``pp``; 0 is every rank where there is no pipeline.
    """
    if job.layout.world_size == 1:
        return []
    return list(_predict_alike(job, first_alike(job, place), schedule_version(job)))


@functools.lru_cache(maxsize=256)
def _predict_alike(job: Job, place: int, version: int) -> tuple[Traffic, ...]:
    """The same at the first of alike places; ``version`` is that of the schedule's file."""
    layout = job.layout
    rows = predict_groups(job, place) if layout.zero >= 2 else predict_buckets(job, place)
    rows += predict_row_saves(job, place)
    rows += predict_control(job)
    if layout.cp > 1:
        rows += predict_context(job, place)
    if has_experts(job):
        rows += predict_experts(job, place)
    if layout.tp > 1:
        rows += predict_tensor(job, place)
    if layout.pp > 1:
        rows += predict_pipeline(job, place)
    return tuple(merge(rows))
