"""Every collective that a layout causes, predicted: axis, operation, phase, calls and bytes on one rank."""

from __future__ import annotations

from meshwright.plan.buckets import bucket_parameters
from meshwright.plan.shapes import FLOAT32_BYTES, count_statistics, list_parameters
from meshwright.plan.sharding import predict_sharded
from meshwright.plan.traffic import (
    CONTROL_EVAL_VALUES,
    CONTROL_NOISE_VALUES,
    CONTROL_STEP_VALUES,
    FLOAT64_BYTES,
    WIRE_BYTES,
    Traffic,
    fixed_buckets,
)
from meshwright.spec.job import Job

__all__ = ["Traffic", "predict_traffic"]


def predict_traffic(job: Job) -> list[Traffic]:
    """All collectives of a replicated or sharded layout; none for one process."""
    if job.layout.dp_shard > 1:
        return predict_sharded(job)
    ranks = job.layout.dp_replicate
    if ranks == 1:
        return []
    parameters = list_parameters(job.model)
    buckets = bucket_parameters(parameters, job.layout.bucket_mb)
    wire_bytes = sum(p.count for p in parameters) * WIRE_BYTES[job.compression.kind]
    values = CONTROL_STEP_VALUES + (CONTROL_NOISE_VALUES if job.train.noise_scale_every else 0)
    rows = [
        fixed_buckets(len(parameters), buckets, "dp_replicate", ranks),
        Traffic("dp_replicate", "all_reduce", "step", ranks, len(buckets), wire_bytes),
        Traffic("control", "all_reduce", "step", ranks, 1, values * FLOAT64_BYTES),
        Traffic("control", "all_reduce", "eval", ranks, 1, CONTROL_EVAL_VALUES * FLOAT64_BYTES),
    ]
    if statistics := count_statistics(job.model):  # averaged at the end of a step, all in one call
        rows.append(Traffic("dp_replicate", "all_reduce", "step", ranks, 1, statistics * FLOAT32_BYTES))
    return rows
