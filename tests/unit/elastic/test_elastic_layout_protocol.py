"""The supervisor of a layout that follows another one, against agents that are played."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from meshwright.core.events import EVENTS_FILE, read_events
from meshwright.elastic.devices import DevicePool
from meshwright.elastic.layout_change import (
    EarlierLayout,
    LayoutChange,
    LayoutChoice,
    NextLayout,
    StateSource,
)
from meshwright.elastic.policy import Budget
from meshwright.elastic.recovery import Recovery
from meshwright.elastic.straggler_policy import StragglerEvent
from meshwright.elastic.supervisor import Supervisor
from meshwright.launch.placement import Device
from played_nodes import FoundPlan, PlayedNodes, exited, ready, starts

GENERATION = 5
DEVICES = frozenset(Device(node, 0) for node in (0, 1, 2))


def follow(tmp_path: Path, agents, source=StateSource(10, reshard_from="plan-0.toml"), ready=(0, 1, 2)):  # noqa: B008
    """The supervisor of two ranks in a layout that begins with generation 5."""
    recovery = Recovery(0.0, None)
    recovery.note_halted(1, "killed")
    change = LayoutChange(
        next=NextLayout(FoundPlan(), DEVICES, "a node is lost"),
        generation=GENERATION - 1,
        furthest_step=12,
        min_position=0,
        recovery=recovery,
        agents=agents,
        ready=frozenset(ready),
        store_dir="store",
        members=frozenset({0, 1, 2}),
        failures=(),
    )
    asked = []
    supervisor = Supervisor(
        "", tmp_path, 2, GENERATION, 10.0, lambda event: None, budget=Budget(3, "wait", 0.0, may_change=True)
    )
    supervisor.agents, supervisor.furthest_step = agents, 12
    supervisor.earlier = EarlierLayout(
        change, ("plan-0.toml",), {}, lambda s: asked.append(dict(s)) or source
    )
    pool = DevicePool(DEVICES, grow_after_s=1e9, retry_s=0.0)
    supervisor.layouts = LayoutChoice(pool, lambda devices: FoundPlan(), FoundPlan())
    return supervisor, asked


def retired(node, generation=GENERATION):
    return {
        "is": "retired",
        "node": node,
        "generation": generation,
        "retired_from": 0,
        "steps": {"0": [10, 5]},
    }


def test_ranks_start_when_all_their_nodes_have_answered(tmp_path):
    """Idle nodes are told, too, and not waited for. An answer to the layout before does not count."""
    agents = PlayedNodes(
        [retired(0), retired(1, generation=3)],
        [retired(1)],
        [ready(0, GENERATION), ready(1, GENERATION)],
        [exited(0), exited(1)],
    )
    supervisor, asked = follow(tmp_path, agents)
    assert supervisor.run() == []
    assert [sent for sent in agents.sent if sent[0] == "begin_layout"] == [
        ("begin_layout", node, GENERATION) for node in (0, 1, 2)
    ]
    assert [sorted(steps) for steps in asked] == [[0, 1]]
    assert starts(agents) == [("start", rank, "join", GENERATION) for rank in (0, 1)]
    assert ("drop_retired", 2, None) in agents.sent


def test_a_node_that_is_lost_after_its_answer_is_waited_for(tmp_path):
    """No rank is started without its agent: the next layout is chosen when no other agent joins."""
    agents = PlayedNodes(
        [retired(1)],
        [{"is": "agent_lost", "node": 1}, retired(0)],
        [],
    )
    supervisor, _ = follow(tmp_path, agents)
    assert supervisor.run() == []
    assert starts(agents) == []
    assert supervisor.change is not None
    assert supervisor.change.next.devices == {Device(0, 0), Device(2, 0)}
    assert supervisor.change.plan_files == ("plan-0.toml",), "no rank has loaded its state"


def test_ranks_that_fail_before_all_have_loaded_load_the_same_snapshots(tmp_path):
    """What the nodes have left is asked for again: another agent may have replaced one."""
    failed = {"is": "failed", "rank": 0, "node": 0, "generation": GENERATION, "kind": "RuntimeError"}
    failed |= {"message": "Connection reset by peer", "problems": [], "peer_lost": True}
    agents = PlayedNodes(
        [retired(0), retired(1)],
        [ready(0, GENERATION), exited(1, -9), failed],
        [retired(0), retired(1)],
        [ready(0, GENERATION + 1), ready(1, GENERATION + 1)],
        [exited(0), exited(1)],
    )
    supervisor, asked = follow(tmp_path, agents)
    assert supervisor.run() == []
    assert len(asked) == 2
    assert starts(agents)[2:] == [
        ("command", 0, "join", GENERATION + 1),
        ("start", 1, "join", GENERATION + 1),
    ]
    assert ("list_snapshots", 0, None) not in agents.sent


def test_a_returning_node_that_is_refused_does_not_end_the_run(tmp_path):
    problem = {
        "code": "node-data",
        "rule": "differs",
        "path": "data",
        "value": None,
        "fix": "",
        "message": "",
    }
    refused = {"is": "node_refused", "node": 2, "problems": [problem]}
    agents = PlayedNodes(
        [retired(0), retired(1)],
        [ready(0, GENERATION), ready(1, GENERATION)],
        [refused],
        [exited(0), exited(1)],
    )
    supervisor, _ = follow(tmp_path, agents)
    assert supervisor.run() == []
    assert "node_refused" in [event["event"] for event in read_events(tmp_path / EVENTS_FILE).events]


def test_the_answer_of_an_idle_node_does_not_make_ranks_regroup_twice(tmp_path):
    peer = {"kind": "RuntimeError", "message": "Connection reset by peer", "problems": [], "peer_lost": True}
    snapshots = [
        {"is": "snapshots", "node": node, "steps": {str(node): [10, 5]} if node < 2 else {"2": [10, 5]}}
        for node in (0, 1, 2)
    ]
    agents = PlayedNodes(
        [retired(0), retired(1)],
        [ready(0, GENERATION), ready(1, GENERATION)],
        [exited(1, -9), {"is": "failed", "rank": 0, "node": 0, "generation": GENERATION, **peer}],
        snapshots,
        [ready(0, GENERATION + 1), ready(1, GENERATION + 1)],
        [exited(0), exited(1)],
    )
    supervisor, _ = follow(tmp_path, agents)
    assert supervisor.run() == []
    assert supervisor.generation == GENERATION + 1


def test_a_node_that_is_missing_from_the_start_of_a_layout_is_not_waited_for_without_end(tmp_path):
    """It was lost while the ranks of the layout before left."""
    agents = PlayedNodes([])
    agents.nodes = frozenset({0, 2})
    supervisor, _ = follow(tmp_path, agents, ready=(0, 2))
    assert supervisor.run() == []
    assert supervisor.change is not None


def test_a_signal_between_two_layouts_stops_the_run_before_its_ranks_start(tmp_path):
    agents = PlayedNodes([], [retired(0), retired(1)])
    supervisor, _ = follow(tmp_path, agents)
    supervisor.stops = [signal.SIGINT]
    assert supervisor.run() == [signal.SIGINT]
    assert starts(agents) == []
    assert supervisor.change is None


class PlayedStragglers:
    """Names rank 1 after each step."""

    def __init__(self, phase):
        self.found = StragglerEvent("straggler", {"rank": 1, "phase": phase}, "exclude")

    def feed(self, event):
        return [self.found]


@pytest.mark.parametrize(
    ("phase", "left"),
    [
        ("compute", {Device(0, 0), Device(1, 1), Device(2, 0)}),
        ("communication", {Device(0, 0), Device(2, 0)}),
    ],
)
def test_a_straggler_is_left_out_with_its_node_if_its_network_link_is_slow(tmp_path, phase, left):
    step = {"is": "event", "rank": 0, "node": 0, "event": {"event": "step", "rank": 0, "step": 12}}
    done = {"is": "event", "rank": 0, "node": 0}
    done["event"] = {"event": "finished", "rank": 0, "status": "interrupted"}
    agents = PlayedNodes(
        [retired(0), retired(1)],
        [ready(0, GENERATION), ready(1, GENERATION)],
        [step],
        [done, exited(0), exited(1)],
    )
    supervisor, _ = follow(tmp_path, agents)
    supervisor.stragglers = PlayedStragglers(phase)
    devices = DEVICES | {Device(1, 1)}
    pool = DevicePool(devices, grow_after_s=1e9, retry_s=0.0)
    supervisor.layouts = LayoutChoice(pool, lambda devices: FoundPlan(), FoundPlan())
    assert supervisor.run() == []
    assert supervisor.change is not None
    assert supervisor.change.next.devices == left
    assert "rank 1 is a straggler" in supervisor.change.next.reason
