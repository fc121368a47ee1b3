"""The phases of a hierarchical all-reduce: which ranks exchange data inside nodes, and which between nodes.

A backend runs collectives of process groups faster than point-to-point messages from Python. A hierarchical
schedule can be run as three of them, if all nodes have the same number of ranks: reduce-scatter inside each
node, all-reduce of each shard between the nodes, all-gather inside each node. The groups and the shards are
read from the messages of the schedule.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from meshwright.schedule.collective.steps import CollectiveSchedule

Groups = tuple[tuple[int, ...], ...]


class Phases(NamedTuple):
    """The groups of ranks that exchange data. Every rank is in one group of each kind."""

    inside: Groups
    """Ranks of a node. The i-th one gets the i-th of equal shards."""
    between: Groups
    """Ranks of all nodes with the same shard."""


def find_phases(schedule: CollectiveSchedule) -> Phases:
    """The groups of a hierarchical all-reduce over nodes of equal size.

    Args:
        schedule: With ``groups``: the ranks of each node.
    """
    node_of = {rank: k for k, node in enumerate(schedule.groups) for rank in node}
    inside: dict[int, set[int]] = {rank: {rank} for rank in node_of}
    between: dict[int, set[int]] = {rank: {rank} for rank in node_of}
    shards: dict[int, set[int]] = defaultdict(set)
    for rank, row in enumerate(schedule.rows):
        for send in (send for step in row for send in step.sends):
            crosses = node_of[send.peer] != node_of[rank]
            _join(between if crosses else inside, rank, send.peer)
            if crosses:
                shards[rank].update(range(send.start, send.stop))
    nodes = {tuple(sorted(group, key=lambda r: min(shards[r], default=-1))) for group in inside.values()}
    for node in nodes:
        size = schedule.chunks // len(node)
        expected = [set(range(i * size, (i + 1) * size)) for i in range(len(node))]
        assert [shards[rank] for rank in node] == expected, (
            "nodes differ in size, or lanes are not contiguous"
        )
    lanes = {tuple(sorted(group)) for group in between.values()}
    return Phases(tuple(sorted(nodes)), tuple(sorted(lanes)))


def _join(groups: dict[int, set[int]], rank: int, peer: int) -> None:
    """Make one group of those of two ranks."""
    if groups[rank] is not groups[peer]:
        merged = groups[rank] | groups[peer]
        for member in merged:
            groups[member] = merged
