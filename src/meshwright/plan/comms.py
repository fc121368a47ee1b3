"""Every collective that a layout causes, predicted: axis, operation, phase, calls and bytes on one rank."""

from __future__ import annotations

from meshwright.plan.buckets import bucket_parameters
from meshwright.plan.shapes import FLOAT32_BYTES, count_statistics, list_parameters
from meshwright.plan.sharding import predict_sharded
from meshwright.plan.tensor import held_model, predict_tensor
from meshwright.plan.traffic import WIRE_BYTES, Traffic, fixed_buckets, merge, predict_control
from meshwright.spec.job import Job

__all__ = ["Traffic", "predict_traffic"]


def predict_traffic(job: Job) -> list[Traffic]:
    """All collectives of a layout; none for one process."""
    layout = job.layout
    if layout.world_size == 1:
        return []
    rows = []
    if layout.dp_shard > 1:
        rows += predict_sharded(job)
    elif layout.dp_replicate > 1:
        rows += _replicated(job)
    rows += predict_control(job)
    if layout.tp > 1:
        rows += predict_tensor(job)
    return merge(rows)


def _replicated(job: Job) -> list[Traffic]:
    """DDP's buckets, and the statistics of batch norms."""
    ranks, parameters = job.layout.dp_replicate, list_parameters(held_model(job))
    buckets = bucket_parameters(parameters, job.layout.bucket_mb)
    wire_bytes = sum(p.count for p in parameters) * WIRE_BYTES[job.compression.kind]
    rows = [
        fixed_buckets(len(parameters), buckets, "dp_replicate", ranks),
        Traffic("dp_replicate", "all_reduce", "step", ranks, len(buckets), wire_bytes),
    ]
    if statistics := count_statistics(job.model):  # averaged at the end of a step, all in one call
        rows.append(Traffic("dp_replicate", "all_reduce", "step", ranks, 1, statistics * FLOAT32_BYTES))
    return rows
