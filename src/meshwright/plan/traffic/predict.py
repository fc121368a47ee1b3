"""Predicts all collectives of a layout: axis, operation, phase, calls and bytes on one rank."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshwright.layout.axes import has_experts
from meshwright.layout.pipeline_schedules import schedule_version
from meshwright.layout.stages import representative_pp_rank
from meshwright.plan.contract import CollectiveTraffic
from meshwright.plan.traffic.context import predict_context
from meshwright.plan.traffic.control import predict_control
from meshwright.plan.traffic.ddp import predict_ddp
from meshwright.plan.traffic.expert import predict_expert
from meshwright.plan.traffic.fsdp import predict_fsdp
from meshwright.plan.traffic.pipeline import predict_pipeline
from meshwright.plan.traffic.tensor import predict_tensor
from meshwright.spec.job import Job


def predict_traffic(job: Job, pp_rank: int = 0) -> list[CollectiveTraffic]:
    """All collectives of a rank; empty for a world size of 1.

    Args:
        job: With a complete layout.
        pp_rank: The rank's index on the axis ``pp``; 0 without a pipeline.
    """
    if job.layout.world_size == 1:
        return []
    return list(_predict_cached(job, representative_pp_rank(job, pp_rank), schedule_version(job)))


@functools.lru_cache(maxsize=256)
def _predict_cached(job: Job, pp_rank: int, version: int) -> tuple[CollectiveTraffic, ...]:
    """The same for one of several identical pipeline ranks; ``version`` is that of the schedule file."""
    layout = job.layout
    rows = predict_fsdp(job, pp_rank) if layout.zero >= 2 else predict_ddp(job, pp_rank)
    rows += predict_control(job)
    if layout.cp > 1:
        rows += predict_context(job, pp_rank)
    if has_experts(job):
        rows += predict_expert(job, pp_rank)
    if layout.tp > 1:
        rows += predict_tensor(job, pp_rank)
    if layout.pp > 1:
        rows += predict_pipeline(job, pp_rank)
    return tuple(merge_rows(rows))


def merge_rows(rows: Iterable[CollectiveTraffic]) -> list[CollectiveTraffic]:
    """One row per axis, operation and phase, in order of first occurrence; rows without calls are dropped."""
    kinds: dict[tuple[str, str, str], list[CollectiveTraffic]] = {}
    for row in rows:
        kinds.setdefault((row.axis, row.op, row.phase), []).append(row)
    merged = [
        CollectiveTraffic(
            *kind, same[-1].ranks, sum(row.calls for row in same), sum(row.bytes for row in same)
        )
        for kind, same in kinds.items()
    ]
    return [row for row in merged if row.calls]


def merge_pp_ranks(rows: Sequence[Sequence[CollectiveTraffic]]) -> list[CollectiveTraffic]:
    """The rows of all pipeline ranks as one list; rows equal on all ranks come once, without ``pp_rank``."""
    shared = [row for row in rows[0] if all(row in others for others in rows[1:])]
    own = [
        replace(row, pp_rank=pp_rank)
        for pp_rank, of_rank in enumerate(rows)
        for row in of_rank
        if row not in shared
    ]
    return [*shared, *own]
