"""The naive algorithms: everything goes through one rank (gather, then broadcast).

Groups are lists of ranks; the first is the root. ``shards[i]`` are the chunks of member i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.schedule.collective.rounds import Chunks, Rounds, collect_rounds, copy_message
from meshwright.schedule.collective.steps import Combine

Pair = Callable[[int, int], Chunks]
"""The chunks from a source rank for a target rank."""


def naive_broadcast(group: Sequence[int], segments: Sequence[Chunks]) -> Rounds:
    """The root sends the whole tensor to one rank after the other."""
    whole = [chunk for segment in segments for chunk in segment]
    return collect_rounds(copy_message(i - 1, group[0], group[i], whole) for i in range(1, len(group)))


def naive_scatter(group: Sequence[int], shards: Sequence[Chunks]) -> Rounds:
    """The root sends each rank its shard, one after the other."""
    return collect_rounds(copy_message(i - 1, group[0], group[i], shards[i]) for i in range(1, len(group)))


def naive_all_gather(group: Sequence[int], shards: Sequence[Chunks]) -> Rounds:
    """Gather to the first rank; it then sends each rank what that rank lacks."""
    gather = naive_scatter(group, shards).reverse(Combine.COPY)
    lacking = [[c for j, shard in enumerate(shards) if j != i for c in shard] for i in range(len(group))]
    return gather.then(naive_scatter(group, lacking))


def naive_all_to_all(group: Sequence[int], pair: Pair) -> Rounds:
    """Each rank sends directly to each other rank: in round k to the rank k + 1 places after it."""
    ranks = len(group)
    return collect_rounds(
        copy_message(k, group[i], target, pair(group[i], target))
        for k in range(ranks - 1)
        for i in range(ranks)
        for target in [group[(i + k + 1) % ranks]]
    )
