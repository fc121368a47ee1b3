"""The supervisor against agents that are played: which rank it names, and what it sends after adoption."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.core.events import EVENTS_FILE, read_events
from meshwright.elastic.hang import Verdict
from meshwright.elastic.policy import Budget
from meshwright.elastic.supervisor import Supervisor
from meshwright.launch.placement import Placement

ADOPTED = {"is": "adopted", "store_dir": "store", "generation": 0, "ranks": [0]}
LOST_PEER = {
    "is": "failed",
    "rank": 0,
    "generation": 0,
    "kind": "RuntimeError",
    "message": "Connection reset by peer",
    "problems": [],
    "peer_lost": True,
}
KILLED = {"is": "exited", "rank": 1, "status": -9}


class PlayedAgents:
    """The agent of two ranks on one node: replays messages, and records what it is sent."""

    nodes, count, interface = frozenset([0]), 1, "lo"
    placement = Placement.in_order(world_size=2, ranks_per_node=2)

    def __init__(self, *batches: list[dict]) -> None:
        self.batches = list(batches)
        self.sent: list[tuple[str, int, str]] = []

    def node_of(self, rank):
        return 0

    def wait(self, timeout_s):
        assert self.batches, "the supervisor waits for a message that never comes"
        return [{**message, "node": 0} for message in self.batches.pop(0)]

    def send(self, rank, message):
        command = message.get("command", {}).get("action", "")
        self.sent.append((message["do"], rank, command))

    def broadcast(self, message):
        pass

    def send_to_node(self, node, message):
        if message["do"] == "list_snapshots":
            ready = {"event": "ready", "generation": 1, "step": 10, "peak_flops_per_s": 1.0, "setup_s": {}}
            self.batches = [
                [{"is": "snapshots", "steps": {"0": [5, 10], "1": [5, 10]}}],
                [{"is": "event", "rank": rank, "event": {**ready, "rank": rank}} for rank in (0, 1)],
                [{"is": "exited", "rank": rank, "status": 0} for rank in (0, 1)],
            ]

    def end_adoption(self):
        pass

    def allow_redial(self, allowed):
        pass

    def close(self, ok=True):
        pass


@pytest.mark.parametrize(
    "batches",
    [
        ([ADOPTED, LOST_PEER, KILLED],),
        ([ADOPTED, KILLED, LOST_PEER],),
        ([ADOPTED], [LOST_PEER], [KILLED]),
        ([ADOPTED], [KILLED], [LOST_PEER]),
    ],
    ids=["at once", "at once, exit first", "one by one", "one by one, exit first"],
)
def test_a_rank_that_ended_before_adoption_is_named_and_only_it_is_replaced(tmp_path: Path, batches):
    """Rank 1 was killed while there was no supervisor, and rank 0 lost its peer. Rank 0 keeps its process."""
    agents = PlayedAgents(*batches)
    supervisor = Supervisor("", tmp_path, 2, 0, 10.0, lambda event: None, budget=Budget(restarts=3))
    supervisor.agents, supervisor.adopts = agents, True  # as `train --resume` does
    assert supervisor.run() == []
    events = read_events(tmp_path / EVENTS_FILE).events
    (lost,) = (event for event in events if event["event"] == "rank_lost")
    assert (lost["failed_rank"], lost["how"]) == (1, "killed by SIGKILL")
    assert [sent for sent in agents.sent if sent[2] == "join"] == [
        ("command", 0, "join"),
        ("start", 1, "join"),
    ]


def test_a_fenced_rank_keeps_its_verdict_when_another_one_follows(tmp_path: Path, monkeypatch):
    """The agent takes a while to fence rank 1. Meanwhile the watch finds that rank 0 waits for data."""
    stopped = Verdict("stopped", "rank 1 is stopped", 1, since_s=3.8, step=7)
    verdicts = iter([stopped, Verdict("data", "rank 0 waits for data", 0, since_s=4.0, step=7)])
    fenced = {"is": "fenced", "rank": 1, "pid": 1, "generation": 0}
    agents = PlayedAgents([{**ADOPTED, "ranks": [0, 1]}], [], [fenced, LOST_PEER])
    supervisor = Supervisor("", tmp_path, 2, 0, 10.0, lambda event: None, budget=Budget(restarts=3))
    supervisor.agents, supervisor.adopts = agents, True
    monkeypatch.setattr(supervisor._recorders, "poll", lambda: next(verdicts, None))
    assert supervisor.run() == []
    assert ("fence", 1, "") in agents.sent
    events = read_events(tmp_path / EVENTS_FILE).events
    (lost,) = (event for event in events if event["event"] == "rank_lost")
    assert (lost["failed_rank"], lost["how"]) == (1, "stopped for 3.8 s, then fenced")
