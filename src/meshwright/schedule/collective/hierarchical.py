"""Hierarchical algorithms over groups of ranks, and 2-D algorithms over a grid.

Groups are the nodes: links inside them are faster than links between them. All-reduce is reduce-scatter
inside the nodes, all-reduce between them, all-gather inside them, each by rings. Nodes may differ in size:
lane j has one member of each node, member j modulo the node's size.

A 2-D algorithm runs two hierarchical ones beside each other, each on half of the data: one over the rows of
the grid, one over the columns, so that both dimensions of links are busy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from meshwright.schedule.collective.naive import Pair, naive_all_to_all, naive_scatter
from meshwright.schedule.collective.recursive import binomial_broadcast
from meshwright.schedule.collective.ring import ring_all_gather, ring_reduce_scatter
from meshwright.schedule.collective.rounds import (
    Chunks,
    Message,
    Rounds,
    collect_rounds,
    copy_message,
    run_beside,
)

Groups = tuple[tuple[int, ...], ...]
"""The ranks of each node."""
Lane = Callable[[int, int], Chunks]
"""The chunks that end on lane j of node k."""
Ring = Callable[[Sequence[int], Sequence[Chunks]], Rounds]
"""A ring algorithm over members and their shards."""


def split_groups(ranks: int, size: int) -> Groups:
    """Consecutive ranks in nodes of this size; the last may be smaller."""
    return tuple(tuple(range(at, min(at + size, ranks))) for at in range(0, ranks, size))


def grid_rows(ranks: int) -> Groups:
    """A grid as square as possible; the last row is shorter if the number of ranks is prime."""
    rows = next(n for n in range(math.isqrt(ranks), 0, -1) if ranks % n == 0)
    uneven = rows == 1 and ranks > 3
    return split_groups(ranks, math.isqrt(ranks - 1) + 1 if uneven else ranks // rows)


def grid_columns(rows: Groups) -> Groups:
    """The columns of a grid."""
    width = max(len(row) for row in rows)
    return tuple(tuple(row[j] for row in rows if len(row) > j) for j in range(width))


def hierarchical_all_gather(groups: Groups, lane: Lane) -> Rounds:
    """Between the nodes on each lane, then inside each node."""
    return _between(groups, lane, ring_all_gather).then(_inside(groups, lane, ring_all_gather))


def hierarchical_reduce_scatter(groups: Groups, lane: Lane) -> Rounds:
    """Inside each node, then between the nodes on each lane."""
    return _inside(groups, lane, ring_reduce_scatter).then(_between(groups, lane, ring_reduce_scatter))


def hierarchical_all_reduce(groups: Groups, lane: Lane) -> Rounds:
    """Reduce-scatter inside the nodes, all-reduce between them on each lane, all-gather inside them."""
    return hierarchical_reduce_scatter(groups, lane).then(hierarchical_all_gather(groups, lane))


def _between(groups: Groups, lane: Lane, ring: Ring) -> Rounds:
    """A ring over the nodes for each lane."""
    nodes = range(len(groups))
    return run_beside(
        ring([groups[k][j % len(groups[k])] for k in nodes], [lane(k, j) for k in nodes])
        for j in range(_lanes(groups))
    )


def _inside(groups: Groups, lane: Lane, ring: Ring) -> Rounds:
    """A ring in each node; a member's shard is that of its lanes, of all nodes."""

    def shard(node: tuple[int, ...], member: int) -> Chunks:
        lanes = range(member, _lanes(groups), len(node))
        return [chunk for j in lanes for k in range(len(groups)) for chunk in lane(k, j)]

    return run_beside(ring(node, [shard(node, i) for i in range(len(node))]) for node in groups)


def _lanes(groups: Groups) -> int:
    return max(map(len, groups))


def hierarchical_broadcast(groups: Groups, root: int, segments: Sequence[Chunks]) -> Rounds:
    """Binomial trees: from the root to one leader per node, then inside the nodes."""
    rooted = _leaders_first(groups, root)
    between = binomial_broadcast([node[0] for node in rooted], segments)
    return between.then(run_beside(binomial_broadcast(node, segments) for node in rooted))


def hierarchical_scatter(groups: Groups, root: int, shard: Callable[[int], Chunks]) -> Rounds:
    """The root sends each node's shards to its leader; leaders pass them on inside."""
    rooted = _leaders_first(groups, root)
    per_node = [[chunk for rank in node for chunk in shard(rank)] for node in rooted]
    between = naive_scatter([node[0] for node in rooted], per_node)
    inside = run_beside(naive_scatter(node, [shard(rank) for rank in node]) for node in rooted)
    return between.then(inside)


def hierarchical_all_to_all(groups: Groups, pair: Pair) -> Rounds:
    """Inside the nodes first: a rank collects what its node has for its lane of all nodes; then between."""
    place = {rank: j for node in groups for j, rank in enumerate(node)}
    everyone = [rank for node in groups for rank in node]

    def lane_chunks(node: tuple[int, ...]) -> Pair:
        def found(source: int, via: int) -> Chunks:
            targets = [t for t in everyone if _collector(node, t, place[t]) == via]
            return [chunk for target in targets for chunk in pair(source, target)]

        return found

    inside = run_beside(naive_all_to_all(node, lane_chunks(node)) for node in groups)
    return inside.then(collect_rounds(_between_nodes(groups, pair, place)))


def _between_nodes(groups: Groups, pair: Pair, place: dict[int, int]) -> Iterator[Message]:
    """In round k, each node sends to the node k + 1 places after it."""
    for k in range(len(groups) - 1):
        for index, node in enumerate(groups):
            for target in groups[(index + k + 1) % len(groups)]:
                chunks = [chunk for source in node for chunk in pair(source, target)]
                yield copy_message(k, _collector(node, target, place[target]), target, chunks)


def _collector(node: tuple[int, ...], target: int, lane: int) -> int:
    """The rank of a node that has the node's data for a target."""
    return target if target in node else node[lane % len(node)]


def _leaders_first(groups: Groups, root: int) -> list[list[int]]:
    """The root's node first, and the root first in it."""
    home = next(k for k, node in enumerate(groups) if root in node)
    nodes = [list(node) for node in groups[home:] + groups[:home]]
    nodes[0].sort(key=lambda rank: rank != root)
    return nodes
