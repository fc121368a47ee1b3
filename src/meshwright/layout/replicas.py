"""Which ranks have the same bits of a parameter, and which of them differ from the others.

Ranks that all-reduce the gradient of a parameter hold replicas of it, or under ZeRO-2 and 3 of the same shard
(``axes``). Routed experts with separate axes have other replicas than the other parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from meshwright.layout.axes import (
    Axis,
    dense_reduce_axis,
    expert_reduce_axis,
    has_expert_axes,
    list_rank_groups,
)
from meshwright.spec.job import Job

CHECKSUM_BYTES = 8
"""One checksum of a rank: an int64."""


def list_replica_axes(job: Job) -> tuple[Axis, ...]:
    """The axes over which parameters are replicated: of experts with separate axes, and of all others.

    The first one is that of the other parameters. An axis of size 1 has no replicas.
    """
    dense = dense_reduce_axis(job.layout)
    return (dense, expert_reduce_axis(job.layout)) if has_expert_axes(job) else (dense,)


def has_replicas(job: Job) -> bool:
    """Whether some parameters are replicated over data-parallel ranks."""
    return max(axis.size for axis in list_replica_axes(job)) > 1


def find_differing_ranks(job: Job, checksums: Sequence[Sequence[int]]) -> list[int]:
    """The ranks whose checksums differ from those of most of their replicas.

    Without a majority, as with two replicas, all ranks of the group are returned.

    Args:
        job: The settled job.
        checksums: One row per rank, with one value per axis of :func:`list_replica_axes`.
    """
    found: set[int] = set()
    for column, axis in enumerate(list_replica_axes(job)):
        groups = list_rank_groups(job.layout, axis.name) if axis.size > 1 else []
        for ranks in groups:
            found.update(_find_minority({rank: checksums[rank][column] for rank in ranks}))
    return sorted(found)


def _find_minority(values: dict[int, int]) -> list[int]:
    common, count = Counter(values.values()).most_common(1)[0]
    if 2 * count <= len(values):
        return list(values)
    return [rank for rank, value in values.items() if value != common]
