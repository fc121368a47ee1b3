"""The phases of hierarchical schedules: groups and shards, read from the messages."""

from __future__ import annotations

import numpy as np
import pytest

from collective_reference import make_inputs
from meshwright.schedule.collective.build import build_collective
from meshwright.schedule.collective.phases import find_phases


def test_two_nodes_of_two_ranks():
    phases = find_phases(build_collective("all_reduce", "hierarchical", 4, ranks_per_node=2))
    assert phases.inside == ((0, 1), (2, 3))
    assert phases.between == ((0, 2), (1, 3))


def test_ranks_of_nodes_may_alternate():
    schedule = build_collective("all_reduce", "hierarchical", 6, groups=[[0, 2, 4], [1, 3, 5]])
    phases = find_phases(schedule)
    assert phases.inside == ((0, 2, 4), (1, 3, 5))
    assert phases.between == ((0, 1), (2, 3), (4, 5))


@pytest.mark.parametrize(("ranks", "per_node"), [(4, 2), (6, 2), (6, 3), (12, 4)])
def test_the_phases_sum_what_the_schedule_sums(ranks, per_node):
    """Reduce-scatter, all-reduce and all-gather over the groups, on numbers."""
    schedule = build_collective("all_reduce", "hierarchical", ranks, ranks_per_node=per_node)
    phases, elements = find_phases(schedule), 5 * per_node
    inputs = make_inputs(schedule, elements)
    shards = {}
    for node in phases.inside:
        total = sum(inputs[rank] for rank in node)
        shards |= dict(zip(node, np.split(total, per_node), strict=True))
    sums = {rank: sum(shards[other] for other in lane) for lane in phases.between for rank in lane}
    for node in phases.inside:
        assert np.array_equal(np.concatenate([sums[rank] for rank in node]), sum(inputs))


def test_nodes_of_different_size_have_no_equal_shards():
    schedule = build_collective("all_reduce", "hierarchical", 5, ranks_per_node=3)
    with pytest.raises(AssertionError, match="nodes differ in size"):
        find_phases(schedule)
