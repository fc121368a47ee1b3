"""Whether a layout fits: one rule for the planner, the plan file and the run.

A rank needs the larger of two peaks of live tensors (first step, steady step), plus what the caching
allocator reserves beyond live tensors, plus the CUDA context and NCCL buffers. A layout fits if that is
within the usable memory of the device, and its offloaded state within its share of CPU memory. A checkpoint
needs no more: ranks write views of their own state, or copy it to CPU memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.core.units import format_bytes
from meshwright.plan.profiles import PROFILES
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job

USABLE_MEMORY = 0.97
"""Fraction of a device's memory that a rank may need, allocator and context included. Of 725 published runs
13% would be refused at this share, and of 198 published out-of-memory layouts 82% (at 1.00: 10% and 80%; at
0.92: 19% and 84%); 16 Nov 2026, the estimate of their frameworks."""
PEAKS = ("steady step", "first step")
"""Names of the peaks."""


def usable_bytes(cluster: Cluster) -> int:
    """Memory of a device that a rank may need."""
    return int(cluster.memory_bytes * USABLE_MEMORY)


def describe_usable(cluster: Cluster) -> str:
    """The usable memory as text."""
    return (
        f"{USABLE_MEMORY:.0%} of {format_bytes(cluster.memory_bytes)}, {format_bytes(usable_bytes(cluster))}"
    )


@dataclass(frozen=True)
class MemoryNeed:
    """Device memory that one rank needs, in bytes."""

    steady_step: int
    """Peak of live tensors in a step after the first."""
    first_step: int
    """The same in the first step of a run."""
    allocator: int
    """Bytes that the caching allocator reserves beyond live tensors, at the largest peak."""
    context: int
    """CUDA context and NCCL buffers."""

    @classmethod
    def of(cls, job: Job, steady_step: int, first_step: int) -> MemoryNeed:
        """The need of a rank with these peaks of live tensors."""
        reserve, context = overhead(job)
        largest = max(steady_step, first_step)
        return cls(steady_step, first_step, round(largest * reserve), context)

    @property
    def peaks(self) -> dict[str, int]:
        """The peaks of live tensors, by name."""
        return dict(zip(PEAKS, (self.steady_step, self.first_step), strict=True))

    @property
    def limited_by(self) -> str:
        """The largest peak; if both are equal, the steady step."""
        return max(PEAKS, key=lambda name: self.peaks[name])

    @property
    def needed_bytes(self) -> int:
        """All of it."""
        return max(self.peaks.values()) + self.allocator + self.context


def overhead(job: Job) -> tuple[float, int]:
    """The allocator's reserve as a fraction of live tensors, and the bytes of the context; 0 on CPUs."""
    rules = PROFILES[job.train.runtime].memory
    return (rules.reserve, int(rules.context_bytes)) if job.cluster.device == "cuda" else (0.0, 0)
