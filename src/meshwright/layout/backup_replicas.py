"""Sizes of the gradient exchange of backup replicas (``layout.backup_replicas``)."""

from __future__ import annotations

from meshwright.layout.ddp_buckets import bucket_stage
from meshwright.layout.stages import local_stages
from meshwright.spec.job import Job

CLAIM_BYTES = 16
"""Bytes of a replica's claim: two float64 values, the slice that it holds and its time."""


def padded_size(count: int, ranks: int) -> int:
    """Elements of a bucket that can be split into equal parts for all ranks."""
    return -(-count // ranks) * ranks


def padded_buckets(job: Job) -> list[int]:
    """Elements of each exchanged bucket."""
    (stage,) = local_stages(job, 0)
    buckets = bucket_stage(stage, False, job.layout.bucket_mb)
    return [padded_size(sum(p.count for p in bucket), job.layout.dp_replicate) for bucket in buckets]
