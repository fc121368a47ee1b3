"""Which device each rank uses."""

from __future__ import annotations

from meshwright.launch.placement import Device, Placement
from meshwright.layout.placement import RankPlacement


def test_ranks_fill_node_after_node():
    placement = Placement.in_order(world_size=5, ranks_per_node=2)
    assert [tuple(device) for device in placement.devices] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert placement.nodes == {0, 1, 2}
    assert [placement.ranks_on(node) for node in (0, 1, 2, 3)] == [[0, 1], [2, 3], [4], []]


def test_ranks_use_the_devices_that_are_left_node_by_node():
    left = frozenset({Device(3, 0), Device(0, 1), Device(3, 1), Device(0, 0)})
    placement = Placement.on(left, world_size=3)
    assert placement.devices == (Device(0, 0), Device(0, 1), Device(3, 0))
    assert Placement.from_pairs([list(device) for device in placement.devices]) == placement


def test_groups_that_communicate_most_stay_on_one_node():
    """Device 1 of node 0 is left out: its node has no whole group of four."""
    left = frozenset(Device(node, number) for node in (0, 1, 2) for number in range(4)) - {Device(0, 1)}
    placement = Placement.on(left, world_size=8, block=4)
    assert [device.node for device in placement.devices] == [1] * 4 + [2] * 4
    assert Placement.on(left, world_size=9, block=4).nodes == {0, 1, 2}, "too few whole groups"


def test_ranks_have_the_devices_that_the_plan_names():
    placement = Placement.from_plan(RankPlacement((0, 2, 1, 3), per_node=2))
    assert placement.devices == (Device(0, 0), Device(1, 0), Device(0, 1), Device(1, 1))
    assert [placement.ranks_on(node) for node in (0, 1)] == [[0, 2], [1, 3]]


def test_slots_of_a_later_layout_are_the_devices_that_are_left():
    """Node 1 of three is lost: slots 2 and 3 are on node 2."""
    left = [Device(2, 1), Device(0, 0), Device(2, 0), Device(0, 1)]
    placement = Placement.from_slots(left, (0, 2, 1, 3))
    assert placement.devices == (Device(0, 0), Device(2, 0), Device(0, 1), Device(2, 1))
