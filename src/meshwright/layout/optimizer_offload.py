"""CPU offload: which state is in CPU memory, and the staging buffers on the device.

``offload = "optimizer"``: the optimizer state is in pinned CPU memory. The optimizer step streams it
through the device bucket by bucket, with three staging buffers: one copies in, one is updated, one copies
out. ``"all"`` (ZeRO-2 and 3): parameters, gradients and optimizer state are in CPU memory, and the CPU runs
the optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.layout.axes import has_expert_axes
from meshwright.layout.ddp_buckets import bucket_kinds, local_buckets
from meshwright.layout.fsdp_groups import optimizer_bytes
from meshwright.layout.stages import local_stages, pp_rank_of
from meshwright.spec.job import Job

STAGING_BUFFERS = 3
"""Buckets of state on the device at once: copying in, updating, copying out."""
OFFLOADED = {
    "none": (),
    "optimizer": ("optimizer",),
    "all": ("parameters", "gradients", "optimizer"),
}
"""Kinds of state in CPU memory."""


def offloaded_state(job: Job, state: dict[str, int]) -> dict[str, int]:
    """The bytes of a rank's state in CPU memory, by kind."""
    away = OFFLOADED[job.layout.offload]
    return {kind: size if kind in away else 0 for kind, size in state.items()}


def list_state_buckets(job: Job, rank: int = 0) -> list[list[str]]:
    """Names of parameters whose state is streamed together: the gradient buckets."""
    return local_buckets(job, pp_rank_of(job, rank))


def staging_sizes(buckets: Sequence[int]) -> list[int]:
    """Sizes of the staging buffers. Buckets use them round-robin; each has the size of its largest bucket."""
    return [max(buckets[index::STAGING_BUFFERS]) for index in range(min(STAGING_BUFFERS, len(buckets)))]


def staging_bytes(job: Job, rank: int = 0) -> int:
    """Device memory of the staging buffers; 0 without a streamed optimizer state."""
    if job.layout.offload != "optimizer":
        return 0
    buckets: list[int] = []
    for part in local_stages(job, pp_rank_of(job, rank)):
        kinds, order = bucket_kinds(part.representative, has_expert_axes(job), job.layout.bucket_mb)
        sizes = [sum(optimizer_bytes(job, p, rank) for p in bucket) for bucket in kinds]
        buckets += [sizes[kind] for kind in order]
    return sum(staging_sizes(buckets))
