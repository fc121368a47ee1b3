"""What leaves the device: which state lies on the host, and the buffers through which it is streamed.

``offload = "optimizer"``: moments lie on the host. In the update they come to the device bucket by bucket,
are updated there and go back: a slot for what comes, one at work, one for what goes. ``"all"`` (ZeRO-2 and
3): parameters, gradients and moments lie on the host, which takes the update too; nothing is streamed for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.layout.axes import experts_apart
from meshwright.layout.fsdp_groups import optimizer_bytes
from meshwright.layout.stages import bucket_kinds, held_buckets, held_parts, pipeline_rank
from meshwright.spec.job import Job

SLOTS = 3
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
    return held_buckets(job, pipeline_rank(job, rank))


def slot_sizes(buckets: Sequence[int]) -> list[int]:
    """Buckets take the slots in turn; each slot is as large as the largest of its own."""
    return [max(buckets[place::SLOTS]) for place in range(min(SLOTS, len(buckets)))]


def streaming_bytes(job: Job, rank: int = 0) -> int:
    """Device memory for what is streamed; none where nothing is, or the host takes the update."""
    if job.layout.offload != "optimizer":
        return 0
    buckets: list[int] = []
    for part in held_parts(job, pipeline_rank(job, rank)):
        kinds, order = bucket_kinds(part.representative, experts_apart(job), job.layout.bucket_mb)
        sizes = [sum(optimizer_bytes(job, p, rank) for p in bucket) for bucket in kinds]
        buckets += [sizes[kind] for kind in order]
    return sum(slot_sizes(buckets))
