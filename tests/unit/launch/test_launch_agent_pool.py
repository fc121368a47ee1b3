"""The agents of a run: one that hangs as soon as it has joined, and one whose node leaves."""

from __future__ import annotations

import pytest

from meshwright.launch.agent_pool import AgentPool
from meshwright.launch.channel import Channel, connected_pair
from meshwright.launch.placement import Placement
from meshwright.launch.remote_nodes import RemoteAgent
from meshwright.launch.silence import SILENT_S, SilenceWatch


class Accepting:
    """Accepts no further agents."""

    count, spares = 2, 0

    def __init__(self):
        self.sessions = {}
        self.channel, self.there = connected_pair()
        self.fileno = self.channel.fileno

    def poll(self, present):
        return [], []

    def close(self, ok=True):
        self.channel.close()
        self.there.close()


@pytest.fixture
def pool():
    """A pool with a local agent, and the supervisor's connection to the agent of node 1."""
    local, there = connected_pair()
    remote, other_end = connected_pair()
    remote.setblocking(False)
    pool = AgentPool(local, Placement.in_order(2, 1), Accepting())
    pool.clock_s = 0.0
    pool._silence = SilenceWatch(clock=lambda: pool.clock_s)
    pool.add(1, RemoteAgent(remote))
    yield pool, Channel(other_end)
    pool.close()
    there.close()
    other_end.close()


def test_an_agent_that_is_silent_since_it_joined_is_lost(pool):
    """It was stopped after its answer, before it could send anything else."""
    pool, _ = pool
    lost = []
    while pool.clock_s <= SILENT_S:
        assert lost == []
        pool.clock_s += 1
        lost += pool.wait(0)
    assert lost == [{"is": "agent_lost", "node": 1}]


def test_an_agent_that_is_released_reads_it_and_closes_the_connection(pool):
    """What it still sends is read: otherwise the connection would be reset, and the command lost."""
    pool, agent = pool
    agent.send({"is": "watch", "received": 0})
    pool.release(1)
    assert pool.nodes == {0}
    assert pool.wait(0) == []
    commands = agent.receive()
    assert {"do": "end", "ok": True, "left": True} in commands
    agent.close()
    assert pool.wait(1) == []
    assert pool._released == []
