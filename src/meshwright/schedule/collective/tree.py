"""Binary trees and double binary trees.

The tree is NCCL's: members in order, each interior member between its two subtrees, the root with one child.
Its depth is log2 of the number of members, rounded up. The second tree of a pair is the first one mirrored
(even number of members) or shifted by one (odd): a member with two children in one has none in the other.
Source: Sanders, Speck and Träff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan".
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.schedule.collective.rounds import Chunks, Rounds, collect_rounds, copy_message
from meshwright.schedule.collective.steps import Combine

Parents = tuple[int | None, ...]
"""The parent of each member; None for the root."""


def binary_tree(members: int) -> Parents:
    """The binary tree over members 0 to ``members - 1``; member 0 is the root."""
    return tuple(_parent(member, members) for member in range(members))


def second_tree(members: int) -> Parents:
    """The other tree of a double binary tree."""
    first = binary_tree(members)
    mirrored = members % 2 == 0

    def move(member: int) -> int:
        return members - 1 - member if mirrored else (member + 1) % members

    parents: list[int | None] = [None] * members
    for member, parent in enumerate(first):
        parents[move(member)] = None if parent is None else move(parent)
    return tuple(parents)


def _parent(member: int, members: int) -> int | None:
    """Clear the lowest bit and set the next one; just clear it if there is no such member."""
    if member == 0:
        return None
    bit = member & -member
    parent = (member ^ bit) | (bit << 1)
    return parent if parent < members else member ^ bit


def find_depths(parents: Parents) -> tuple[int, ...]:
    """Links between each member and the root."""
    depths = []
    for member in range(len(parents)):
        depth, at = 0, parents[member]
        while at is not None:
            depth, at = depth + 1, parents[at]
        depths.append(depth)
    return tuple(depths)


def broadcast_along(group: Sequence[int], parents: Parents, segments: Sequence[Chunks]) -> Rounds:
    """Segment p reaches depth d in round d - 1 + p; a member sends to both children in one round."""
    depths = find_depths(parents)
    return collect_rounds(
        copy_message(depths[member] - 1 + p, group[parent], group[member], segment)
        for p, segment in enumerate(segments)
        for member, parent in enumerate(parents)
        if parent is not None
    )


def tree_broadcast(group: Sequence[int], segments: Sequence[Chunks]) -> Rounds:
    """From the first member along the binary tree."""
    return broadcast_along(group, binary_tree(len(group)), segments)


def tree_scatter(group: Sequence[int], shards: Sequence[Chunks]) -> Rounds:
    """Each member passes on the shards of its subtrees."""
    parents = binary_tree(len(group))
    depths = find_depths(parents)
    below: list[list[int]] = [list(shard) for shard in shards]
    for member in sorted(range(len(group)), key=lambda m: -depths[m]):
        parent = parents[member]
        if parent is not None:
            below[parent] += below[member]
    return collect_rounds(
        copy_message(depths[member] - 1, group[parent], group[member], below[member])
        for member, parent in enumerate(parents)
        if parent is not None
    )


def tree_all_reduce(group: Sequence[int], segments: Sequence[Chunks]) -> Rounds:
    """Reduce to the first member, then broadcast; segments are pipelined through both."""
    return _all_reduce_along(group, binary_tree(len(group)), segments)


def double_tree_broadcast(group: Sequence[int], segments: Sequence[Chunks]) -> Rounds:
    """The root sends each half of the segments to the root of another tree over the other members."""
    root, others = group[0], group[1:]
    if len(others) < 2:
        return tree_broadcast(group, segments)
    trees = (binary_tree(len(others)), second_tree(len(others)))
    found = Rounds()
    for tree, half in zip(trees, _halve(segments), strict=True):
        first = others[tree.index(None)]
        entry = collect_rounds(copy_message(p, root, first, segment) for p, segment in enumerate(half))
        below_entry = broadcast_along(others, tree, half)
        found = found.beside(entry.beside(Rounds(count=1).then(below_entry)))
    return found


def double_tree_all_reduce(group: Sequence[int], segments: Sequence[Chunks]) -> Rounds:
    """Each half of the segments is reduced and broadcast along its own tree."""
    trees = (binary_tree(len(group)), second_tree(len(group)))
    halves = _halve(segments)
    return _all_reduce_along(group, trees[0], halves[0]).beside(_all_reduce_along(group, trees[1], halves[1]))


def _all_reduce_along(group: Sequence[int], parents: Parents, segments: Sequence[Chunks]) -> Rounds:
    """The first segment is at the root after ``depth`` rounds, and goes down while the others come up."""
    # Reversing also reverses the order of the segments: give them backwards.
    up = broadcast_along(group, parents, segments[::-1]).reverse(Combine.REDUCE)
    down = broadcast_along(group, parents, segments)
    return up.beside(Rounds(count=max(find_depths(parents))).then(down))


def _halve(segments: Sequence[Chunks]) -> tuple[Sequence[Chunks], Sequence[Chunks]]:
    middle = len(segments) // 2
    return segments[:middle], segments[middle:]
