"""The agent of one node receives SIGTERM: the supervisor, against agents that are played."""

from __future__ import annotations

import signal

import pytest

from meshwright.core.errors import RunFailedError
from meshwright.core.events import EVENTS_FILE, read_events
from meshwright.elastic import preemption
from meshwright.elastic.devices import DevicePool
from meshwright.elastic.layout_change import LayoutChoice
from meshwright.elastic.policy import Budget
from meshwright.elastic.supervisor import Supervisor
from meshwright.launch.placement import Device
from played_nodes import FoundPlan, PlayedNodes, exited, ready, starts

LEAVE = {"is": "leave", "node": 1}


def hello(node):
    return {"is": "hello", "node": node, "store_dir": "store"}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Nodes leave without waiting for others."""
    monkeypatch.setattr(preemption, "COLLECT_S", 0.0)


def finished(status="interrupted"):
    event = {"event": "finished", "rank": 0, "generation": 0, "status": status, "step": 7}
    return {"is": "event", "rank": 0, "node": 0, "event": event}


def run_with(tmp_path, *batches, may_change=True, spares=0, nodes=(0, 1)):
    """The supervisor of one rank on each of two nodes, of which the second one leaves."""
    agents = PlayedNodes(
        [hello(node) for node in nodes], [ready(0, 0), ready(1, 0)], *batches, nodes=nodes, spares=spares
    )
    supervisor = Supervisor("", tmp_path, 2, 0, 10.0, lambda event: None, agents=agents)
    supervisor.budget = Budget(3, "give-up", 0.0, may_change=may_change)
    supervisor.find_checkpoint = lambda: "step-7"
    if may_change:
        pool = DevicePool(frozenset(agents.placement.devices), grow_after_s=1e9, retry_s=0.0)
        supervisor.layouts = LayoutChoice(pool, lambda devices: FoundPlan(), FoundPlan())
    return supervisor, agents


def events_of(tmp_path, name):
    return [event for event in read_events(tmp_path / EVENTS_FILE).events if event["event"] == name]


def stops(agents):
    return [sent for sent in agents.sent if sent[0] == "command" and sent[2] == "stop"]


def test_a_run_that_may_shrink_goes_on_without_the_node(tmp_path):
    """All ranks save after their step; then the agent is released. One node of two is no partition."""
    supervisor, agents = run_with(tmp_path, [LEAVE], [finished(), exited(0), exited(1)])
    assert supervisor.run() == []
    assert [sent[1] for sent in stops(agents)] == [0, 1]
    assert agents.sent.index(("release", 1)) > agents.sent.index(stops(agents)[-1])
    assert supervisor.change is not None
    assert supervisor.change.next.devices == {Device(0, 0)}
    assert (supervisor.change.ready, supervisor.change.members) == ({0}, {0})
    assert [event["action"] for event in events_of(tmp_path, "node_leaving")] == ["shrink"]
    assert [event["replaced"] for event in events_of(tmp_path, "node_left")] == [False]


@pytest.mark.parametrize("may_change", [False, True])
def test_a_spare_node_takes_over(tmp_path, may_change):
    """The ranks of the same layout start again from the checkpoint, whatever may change."""
    supervisor, agents = run_with(
        tmp_path,
        [LEAVE],
        [finished(), exited(0), exited(1)],
        [{"is": "node_joined", "node": 1, "host": "host-2"}, hello(1)],
        [{"is": "snapshots", "node": 0, "steps": {"0": [5, 7]}}, {"is": "snapshots", "node": 1, "steps": {}}],
        [ready(0, 1), ready(1, 1)],
        [finished("complete"), exited(0), exited(1)],
        may_change=may_change,
        spares=1,
    )
    assert supervisor.run() == []
    assert supervisor.change is None
    assert starts(agents)[2:] == [("start", 0, "join", 1), ("start", 1, "join", 1)]
    assert [event["action"] for event in events_of(tmp_path, "node_leaving")] == ["replace"]
    (recovered,) = events_of(tmp_path, "recovered")
    assert (recovered["source"], recovered["failed_rank"]) == ("checkpoint", None)


def test_a_run_that_may_not_change_and_has_no_spare_stops(tmp_path):
    supervisor, agents = run_with(tmp_path, [LEAVE], [], [finished(), exited(0), exited(1)], may_change=False)
    assert supervisor.run() == [signal.SIGTERM]
    assert [sent[0] for sent in agents.sent if sent[0] in ("signal", "release")] == ["signal", "signal"]
    assert [event["action"] for event in events_of(tmp_path, "node_leaving")] == ["stop"]


def test_a_node_that_is_taken_away_before_its_ranks_have_saved_is_lost(tmp_path):
    """As any lost node: one of two nodes is no majority."""
    failed = {"is": "failed", "rank": 0, "node": 0, "generation": 0, "kind": "RuntimeError"}
    failed |= {"message": "Connection reset by peer", "problems": [], "peer_lost": True}
    supervisor, agents = run_with(
        tmp_path, [LEAVE], [{"is": "agent_lost", "node": 1}, failed], [], [exited(0)], nodes=(0, 1, 2)
    )
    with pytest.raises(RunFailedError, match=r"no majority.*\[run-node-lost\]"):
        supervisor.run()
    assert ("release", 1) not in agents.sent
    assert events_of(tmp_path, "node_left") == []
    assert [event["failed_rank"] for event in events_of(tmp_path, "rank_lost")] == [1]


def test_an_idle_node_leaves_at_once(tmp_path):
    """No rank stops."""
    supervisor, agents = run_with(
        tmp_path,
        [{"is": "leave", "node": 2}],
        [finished("complete"), exited(0), exited(1)],
        nodes=(0, 1, 2),
    )
    assert supervisor.run() == []
    assert ("release", 2) in agents.sent
    assert stops(agents) == []
    assert supervisor.change is None


def test_a_lost_spare_is_an_event(tmp_path):
    lost = {"is": "spare_lost", "node": -1, "host": "host-3", "reason": "it was told to leave"}
    supervisor, _ = run_with(tmp_path, [lost], [finished("complete"), exited(0), exited(1)])
    assert supervisor.run() == []
    assert [event["host"] for event in events_of(tmp_path, "spare_lost")] == ["host-3"]


def test_a_node_that_is_told_while_the_ranks_save_leaves_with_the_others(tmp_path):
    """The state is saved once; the run does not start again on a node that is about to be taken away."""
    late = {"is": "leave", "node": 2}
    supervisor, agents = run_with(
        tmp_path, [LEAVE], [late], [finished(), exited(0), exited(1)], nodes=(0, 1, 2)
    )
    assert supervisor.run() == []
    assert {sent for sent in agents.sent if sent[0] == "release"} == {("release", 1), ("release", 2)}
    assert len(stops(agents)) == 2, "one command for each rank"
    assert supervisor.change is not None
    assert supervisor.change.ready == {0}


def test_nodes_that_are_told_within_a_second_leave_together(tmp_path, monkeypatch):
    monkeypatch.setattr(preemption, "COLLECT_S", 1e9)
    supervisor, agents = run_with(tmp_path, [LEAVE], [finished("complete"), exited(0), exited(1)])
    assert supervisor.run() == []
    assert stops(agents) == [], "others may still be told"
