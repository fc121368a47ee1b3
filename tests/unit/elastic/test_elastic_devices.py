"""Which devices a run has left, and when it uses those that came back."""

from __future__ import annotations

import pytest

from meshwright.elastic.devices import DevicePool
from meshwright.launch.placement import Device

ALL = frozenset(Device(node, number) for node in (0, 1) for number in (0, 1))
NODE_0 = frozenset({Device(0, 0), Device(0, 1)})


def pool(**settings):
    return DevicePool(ALL, **{"grow_after_s": 10.0, "retry_s": 100.0, **settings})


def test_devices_of_a_lost_node_are_not_available():
    assert pool().available({0, 1}, 0.0) == ALL
    assert pool().available({0}, 0.0) == NODE_0


@pytest.mark.parametrize(("retry_s", "back"), [(100.0, True), (0.0, False)])
def test_a_device_that_was_left_out_is_tried_again_after_a_time_or_never(retry_s, back):
    devices = pool(retry_s=retry_s)
    devices.exclude(Device(1, 0), now=5.0)
    assert devices.available({0, 1}, 104.0) == ALL - {Device(1, 0)}
    assert (Device(1, 0) in devices.available({0, 1}, 105.0)) is back


def test_a_run_grows_only_after_devices_have_stayed():
    devices = pool()
    devices.plan(NODE_0)
    seen = [
        devices.may_grow(nodes, now) for nodes, now in (({0}, 0), ({0, 1}, 1), ({0, 1}, 10), ({0, 1}, 11))
    ]
    assert seen == [False, False, False, True]


def test_a_node_that_comes_and_goes_starts_the_time_again():
    devices = pool()
    devices.plan(NODE_0)
    steps = (({0, 1}, 0), ({0}, 9), ({0, 1}, 10), ({0, 1}, 19), ({0, 1}, 20))
    assert [devices.may_grow(nodes, now) for nodes, now in steps] == [False, False, False, False, True]


def test_devices_without_a_better_layout_are_not_asked_for_again():
    devices = pool(grow_after_s=0.0)
    devices.plan(NODE_0)
    assert devices.may_grow({0, 1}, 0.0)
    devices.refuse(ALL)
    assert not devices.may_grow({0, 1}, 1.0)


def test_a_run_with_all_its_devices_does_not_grow():
    assert not pool(grow_after_s=0.0).may_grow({0, 1}, 0.0)


def test_whether_a_missing_device_can_come_back():
    devices = pool(retry_s=0.0)
    assert not devices.may_return({0, 1}, 0.0), "none is missing"
    assert devices.may_return({0}, 0.0), "another agent may join"
    devices.exclude(Device(1, 0), now=0.0)
    assert not devices.may_return({0, 1}, 0.0), "it is left out for good"
    devices.include(Device(1, 0))
    assert devices.available({0, 1}, 0.0) == ALL
