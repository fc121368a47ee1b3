"""Which side of a partition may go on: over all partitions of 1 to 5 nodes, at most one."""

from __future__ import annotations

from itertools import chain, combinations

import pytest

from meshwright.elastic.quorum import Quorum


def list_sides(nodes):
    """All subsets."""
    return [set(side) for side in chain.from_iterable(combinations(nodes, n) for n in range(len(nodes) + 1))]


def list_partitions(nodes):
    """All ways to split nodes into sides."""
    if not nodes:
        yield []
        return
    first, rest = nodes[0], nodes[1:]
    for side in list_sides(rest):
        for others in list_partitions([node for node in rest if node not in side]):
            yield [{first, *side}, *others]


def holds(members, connected):
    return Quorum.count(members, connected).holds


@pytest.mark.parametrize(("count", "partitions"), [(1, 1), (2, 2), (3, 5), (4, 15), (5, 52)])
def test_at_most_one_side_of_every_partition_goes_on(count, partitions):
    nodes, seen = list(range(count)), 0
    for sides in list_partitions(nodes):
        seen += 1
        going_on = [side for side in sides if holds(nodes, side)]
        assert len(going_on) <= 1
        assert going_on == [side for side in sides if len(side) > count / 2]
    assert seen == partitions, "Bell's numbers"


@pytest.mark.parametrize("count", [2, 4])
def test_nobody_goes_on_at_a_tie(count):
    nodes = range(count)
    for half in combinations(nodes, count // 2):
        assert not holds(nodes, half)
        assert not holds(nodes, set(nodes) - set(half))


def test_two_generations_in_a_row_have_a_node_in_common():
    """A generation is committed only by a majority of the one before: no two of them exist at once."""
    for members in list_sides(range(5)):
        majorities = [side for side in list_sides(sorted(members)) if members and holds(members, side)]
        assert all(one & other for one in majorities for other in majorities)


def test_nodes_outside_of_the_last_generation_do_not_count():
    """The run went on with nodes 0 and 2; node 1 does not make a majority with node 0."""
    assert not holds({0, 2}, {0, 1})
    assert holds({0, 2}, {0, 1, 2})


def test_before_the_first_generation_nothing_is_held_up():
    assert holds((), ())


def test_the_reason_has_the_numbers():
    assert "1 of 3 nodes" in Quorum.count({0, 1, 2}, {0}).explain()
