"""Every collective that a layout causes, predicted: axis, operation, phase, calls and bytes on one rank."""

from __future__ import annotations

from meshwright.plan.parts import held_buckets, held_parameters
from meshwright.plan.pipeline_traffic import predict_pipeline
from meshwright.plan.shapes import FLOAT32_BYTES, count_statistics
from meshwright.plan.sharding import predict_sharded
from meshwright.plan.tensor_traffic import predict_tensor
from meshwright.plan.traffic import WIRE_BYTES, Traffic, fixed_buckets, join_places, merge, predict_control
from meshwright.spec.job import Job

__all__ = ["Traffic", "join_places", "predict_traffic"]


def predict_traffic(job: Job, place: int = 0) -> list[Traffic]:
    """All collectives of a rank at one place of the pipelines; none for one process.

    Args:
        job: With its layout settled.
        place: The rank's index on the axis ``pp``; 0 is every rank where there is no pipeline.
    """
    layout = job.layout
    if layout.world_size == 1:
        return []
    rows = []
    if layout.dp_shard > 1:
        rows += predict_sharded(job, place)
    elif layout.dp_replicate > 1:
        rows += _replicated(job, place)
    rows += predict_control(job)
    if layout.tp > 1:
        rows += predict_tensor(job, place)
    if layout.pp > 1:
        rows += predict_pipeline(job, place)
    return merge(rows)


def _replicated(job: Job, place: int) -> list[Traffic]:
    """The buckets of gradients, and the statistics of batch norms."""
    ranks, parameters, buckets = (
        job.layout.dp_replicate,
        held_parameters(job, place),
        held_buckets(job, place),
    )
    wire_bytes = sum(p.count for p in parameters) * WIRE_BYTES[job.compression.kind]
    rows = [
        fixed_buckets(job, len(parameters), buckets, "dp_replicate", ranks),
        Traffic("dp_replicate", "all_reduce", "step", ranks, len(buckets), wire_bytes),
    ]
    if statistics := count_statistics(job.model):  # averaged at the end of a step, all in one call
        rows.append(Traffic("dp_replicate", "all_reduce", "step", ranks, 1, statistics * FLOAT32_BYTES))
    return rows
