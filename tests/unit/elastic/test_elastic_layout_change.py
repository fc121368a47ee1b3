"""The choice of the next layout, and the step that its ranks can load from snapshots."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from meshwright.core.errors import Problem, UserError
from meshwright.elastic.devices import DevicePool
from meshwright.elastic.layout_change import LayoutChoice, newest_covering_step
from meshwright.launch.placement import Device

ALL = frozenset(Device(node, 0) for node in range(3))


@dataclass(frozen=True)
class FoundPlan:
    """A plan that is faster with more devices, in pairs."""

    devices: int

    @property
    def step_s(self):
        return 1.0 / max(1, self.devices // 2)


def at_least(count):
    """A planner that needs a number of devices."""

    def find(devices):
        if len(devices) < count:
            raise UserError(Problem("elastic-no-layout", f"needs {count}", "elastic.may_change"))
        return FoundPlan(len(devices))

    return find


def choice(find):
    return LayoutChoice(DevicePool(ALL, grow_after_s=0.0, retry_s=0.0), find, FoundPlan(3))


def test_the_layout_for_the_devices_that_are_left_is_chosen():
    chosen = choice(at_least(2))
    assert chosen.shrink({0, 2}, "node 1 is lost")
    assert (chosen.next.plan, chosen.next.devices) == (FoundPlan(2), {Device(0, 0), Device(2, 0)})


def test_too_few_devices_are_explained_until_more_come():
    chosen = choice(at_least(2))
    assert not chosen.shrink({0}, "nodes are lost")
    assert "needs 2" in chosen.missing
    assert chosen.shrink({0, 1}, "nodes are lost")
    assert chosen.missing == ""


def test_a_run_grows_once_when_devices_come_back():
    chosen = choice(at_least(1))
    chosen.devices.plan(ALL - {Device(1, 0)})
    assert not chosen.grow({0, 2})
    assert chosen.grow({0, 1, 2})
    assert chosen.next.reason == "3 devices are there, 2 before"
    assert not chosen.grow({0, 1, 2}), "the change has begun"


def test_a_run_does_not_grow_without_a_layout():
    chosen = choice(at_least(4))
    chosen.devices.plan(frozenset({Device(0, 0)}))
    assert not chosen.grow({0, 1, 2})
    assert chosen.next is None


def test_a_run_does_not_grow_without_a_faster_layout():
    """Two of four devices are back, and the layout needs all of them."""
    four = frozenset(Device(node, 0) for node in range(4))
    chosen = LayoutChoice(DevicePool(four, grow_after_s=0.0, retry_s=0.0), at_least(1), FoundPlan(2))
    chosen.devices.plan(frozenset({Device(0, 0), Device(1, 0)}))
    assert not chosen.grow({0, 1, 2})
    assert chosen.grow({0, 1, 2, 3}), "all devices are back"


@pytest.mark.parametrize(
    ("kept_by_node", "step"),
    [
        ([{0: [10, 5], 1: [10, 5]}], 10),
        ([{0: [10, 5], 1: [-1, 5]}], 5),  # rank 1 was killed while it wrote
        ([{0: [10, 5]}], None),
        ([{0: [10, 5], 1: [10, 5]}, {0: [5, -1], 1: [5, -1]}], 5),
        ([{0: [10, 5], 1: [10, 5]}, {}], None),  # a new node has none
        ([{}], None),
    ],
)
def test_every_node_needs_snapshots_of_the_whole_state_of_one_step(kept_by_node, step):
    """Here the state is on ranks 0 and 1."""
    assert newest_covering_step(kept_by_node, lambda ranks: {0, 1} <= ranks) == step
