"""Every collective that a layout causes, predicted: axis, operation, phase, calls and bytes on one rank.

Bytes of a call are the larger of what the rank hands in and gets out, before any framing of the backend.
Counts are for one rank and one occurrence of the phase: once at ``setup``, for each ``step``, for each
``eval``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.plan.buckets import bucket_parameters
from meshwright.plan.shapes import list_parameters
from meshwright.spec.job import Job

INT32_BYTES = 4
FLOAT64_BYTES = 8
CONTROL_STEP_VALUES = 3
"""Loss sum, target tokens, wish to stop: reduced once a step."""
CONTROL_NOISE_VALUES = 2
"""Squared norm and number of parts for the gradient noise scale: in every step of a job that measures it."""
CONTROL_EVAL_VALUES = 2
"""Loss sum and target tokens of an evaluation."""
WIRE_BYTES = {"none": 4, "bf16": 2, "fp16": 2}
"""Bytes of a gradient element on the wire, by compression."""


@dataclass(frozen=True)
class Traffic:
    """Calls of one operation on one axis in one phase."""

    axis: str
    op: str
    phase: str
    ranks: int
    calls: int
    bytes: int


def predict_traffic(job: Job) -> list[Traffic]:
    """All collectives of a replicated layout; none for one process."""
    ranks = job.layout.dp_replicate
    if ranks == 1:
        return []
    parameters = list_parameters(job.model)
    buckets = bucket_parameters(parameters, job.layout.bucket_mb)
    wire_bytes = sum(p.count for p in parameters) * WIRE_BYTES[job.compression.kind]
    values = CONTROL_STEP_VALUES + (CONTROL_NOISE_VALUES if job.train.noise_scale_every else 0)
    return [
        _fixed_buckets(len(parameters), buckets, ranks),
        Traffic("dp_replicate", "all_reduce", "step", ranks, len(buckets), wire_bytes),
        Traffic("control", "all_reduce", "step", ranks, 1, values * FLOAT64_BYTES),
        Traffic("control", "all_reduce", "eval", ranks, 1, CONTROL_EVAL_VALUES * FLOAT64_BYTES),
    ]


def _fixed_buckets(parameters: int, buckets: Sequence[object], ranks: int) -> Traffic:
    """DDP broadcasts its bucket assignment from rank 0: all indices and a count, then the sizes."""
    sizes = (parameters + 1 + len(buckets)) * INT32_BYTES
    return Traffic("dp_replicate", "broadcast", "setup", ranks, 2, sizes)
