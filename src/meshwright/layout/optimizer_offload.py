"""What leaves the device: which state lies on the host, and the buffers through which it is streamed.

``offload = "optimizer"``: moments lie on the host. In the update they come to the device bucket by bucket,
are updated there and go back: a slot for what comes, one at work, one for what goes. ``"all"`` (ZeRO-2 and
3): parameters, gradients and moments lie on the host, which takes the update too; nothing is streamed for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.layout.axes import has_expert_axes
from meshwright.layout.fsdp_groups import optimizer_bytes
from meshwright.layout.stages import bucket_kinds, local_buckets, local_stages, pp_rank_of
from meshwright.spec.job import Job

STAGING_BUFFERS = 3
"""Buckets of state on the device at once: arriving, at work, leaving."""
OFFLOADED = {
    "none": (),
    "optimizer": ("optimizer",),
    "all": ("parameters", "gradients", "optimizer"),
}
"""Kinds of state that lie on the host."""


def offloaded_state(job: Job, state: dict[str, int]) -> dict[str, int]:
    """The part of a rank's state that lies on the host, by kind."""
    away = OFFLOADED[job.layout.offload]
    return {kind: size if kind in away else 0 for kind, size in state.items()}


def list_state_buckets(job: Job, rank: int = 0) -> list[list[str]]:
    """Names of parameters whose state is streamed together: those of a bucket of gradients."""
    return local_buckets(job, pp_rank_of(job, rank))


def staging_sizes(buckets: Sequence[int]) -> list[int]:
    """Buckets take the slots in turn; each slot is as large as the largest of its own."""
    return [max(buckets[place::STAGING_BUFFERS]) for place in range(min(STAGING_BUFFERS, len(buckets)))]


def staging_bytes(job: Job, rank: int = 0) -> int:
    """Device memory for what is streamed; none where nothing is, or the host takes the update."""
    if job.layout.offload != "optimizer":
        return 0
    buckets: list[int] = []
    for part in local_stages(job, pp_rank_of(job, rank)):
        kinds, order = bucket_kinds(part.representative, has_expert_axes(job), job.layout.bucket_mb)
        sizes = [sum(optimizer_bytes(job, p, rank) for p in bucket) for bucket in kinds]
        buckets += [sizes[kind] for kind in order]
    return sum(staging_sizes(buckets))
