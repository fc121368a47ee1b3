"""One row of predicted traffic, and how many values the small control reductions carry.

Bytes of a call are the larger of what the rank hands in and gets out, before any framing of the backend.
Counts are for one rank and one occurrence of the phase: once at ``setup``, for each ``step``, each ``eval``,
and each checkpoint (``save``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

INT32_BYTES = 4
FLOAT64_BYTES = 8
CONTROL_STEP_VALUES = 3
"""Loss sum, target tokens, wish to stop: reduced once a step."""
CONTROL_NOISE_VALUES = 2
"""Squared norm and number of parts for the gradient noise scale: in every step of a job that measures it."""
CONTROL_SAVE_VALUES = 1
"""Rank 0's wish to save, where all ranks must take part."""
CONTROL_NORM_VALUES = 1
"""Squared norm of a rank's shard of the gradient, where that is cut: a reduction of its own."""
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


def fixed_buckets(parameters: int, buckets: Sequence[object], axis: str, ranks: int) -> Traffic:
    """DDP broadcasts its bucket assignment from rank 0: all indices and a count, then the sizes."""
    sizes = (parameters + 1 + len(buckets)) * INT32_BYTES
    return Traffic(axis, "broadcast", "setup", ranks, 2, sizes)
