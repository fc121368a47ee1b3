"""Ring algorithms: each rank sends only to the next rank of the ring.

Groups are lists of ranks in ring order; the root is the first. ``shards[i]`` are the chunks of member i.
Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from meshwright.schedule.collective.naive import Pair
from meshwright.schedule.collective.rounds import Chunks, Rounds, collect_rounds, copy_message
from meshwright.schedule.collective.steps import Combine

_Member = TypeVar("_Member")


def ring_broadcast(group: Sequence[int], segments: Sequence[Chunks]) -> Rounds:
    """A chain from the root: segment p crosses the link after member i in round i + p."""
    return collect_rounds(
        copy_message(i + p, group[i], group[i + 1], segment)
        for p, segment in enumerate(segments)
        for i in range(len(group) - 1)
    )


def ring_scatter(group: Sequence[int], shards: Sequence[Chunks]) -> Rounds:
    """A chain from the root; the shard of the farthest rank leaves first, all arrive in the last round."""
    ranks = len(group)
    return collect_rounds(
        copy_message(ranks - 1 - far + i, group[i], group[i + 1], shards[far])
        for far in range(1, ranks)
        for i in range(far)
    )


def ring_all_gather(group: Sequence[int], shards: Sequence[Chunks]) -> Rounds:
    """In round k member i sends the shard of member i - k to the next rank."""
    ranks = len(group)
    return collect_rounds(
        copy_message(k, group[i], group[(i + 1) % ranks], shards[(i - k) % ranks])
        for k in range(ranks - 1)
        for i in range(ranks)
    )


def ring_reduce_scatter(group: Sequence[int], shards: Sequence[Chunks]) -> Rounds:
    """In round k member i sends its sum of the shard of member i - k - 1 to the next rank.

    It is the reverse of an all-gather around the ring in the other direction.
    """
    return ring_all_gather(group[::-1], shards[::-1]).reverse(Combine.REDUCE)


def ring_reduce(group: Sequence[int], segments: Sequence[Chunks]) -> Rounds:
    """A chain that starts behind the root and ends there; segments are pipelined."""
    return ring_broadcast(_backwards(group), segments[::-1]).reverse(Combine.REDUCE)


def ring_gather(group: Sequence[int], shards: Sequence[Chunks]) -> Rounds:
    """A chain that starts behind the root and ends there."""
    return ring_scatter(_backwards(group), _backwards(shards)).reverse(Combine.COPY)


def ring_all_to_all(group: Sequence[int], pair: Pair) -> Rounds:
    """Chunks travel around the ring; a target keeps its own and forwards the rest."""
    ranks = len(group)

    def forwarded(source: int, k: int) -> list[int]:
        """Chunks of a source that have farther to go than k hops."""
        far = [group[(source + hops) % ranks] for hops in range(k + 1, ranks)]
        return [chunk for target in far for chunk in pair(group[source], target)]

    return collect_rounds(
        copy_message(k, group[i], group[(i + 1) % ranks], forwarded((i - k) % ranks, k))
        for k in range(ranks - 1)
        for i in range(ranks)
    )


def _backwards(members: Sequence[_Member]) -> list[_Member]:
    """The root first, the others in the other direction of the ring."""
    return [members[0], *reversed(members[1:])]
