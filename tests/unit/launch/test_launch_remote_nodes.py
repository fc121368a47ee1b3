"""Which agents become a node of a run, and which are refused."""

from __future__ import annotations

import threading
import time

import pytest

from meshwright.core.version import __version__
from meshwright.launch.join import JoinListener, join
from meshwright.launch.network import Address
from meshwright.launch.remote_nodes import RemoteNodes, name_node

TOKEN = b"a token of the run, long enough"


class Run:
    """A run on three nodes that listens, and agents that join it."""

    def __init__(self, adopting=False):
        self.listener = JoinListener(Address("127.0.0.1", 0), TOKEN)
        self.nodes = RemoteNodes(
            self.listener, 3, "run-7", lambda node: {"do": "prepare", "node": node}, adopting, torch="2.13"
        )
        self.present: set[int] = {0}
        self.reports: list[dict] = []
        self.agents: list = []

    def poll(self):
        joined, reports = self.nodes.poll(frozenset(self.present))
        self.reports += reports
        self.agents += [one.agent for one in joined]
        self.present |= {one.node for one in joined}
        return joined

    def poll_until(self, holds, limit_s=10):
        deadline = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < deadline
            self.poll()

    def connect(self, **changes):
        """An agent that has sent its first message; returns its channel and the answer."""
        found: list = []
        thread = threading.Thread(target=lambda: found.append(join(self.listener.address, TOKEN, 5.0)))
        thread.start()
        self.poll_until(lambda: not thread.is_alive())
        (channel,) = found
        hello = {"is": "join", "host": "b", "meshwright": __version__, "torch": "2.13", "run": "", "node": -1}
        channel.send({**hello, **changes})
        channel.setblocking(False)
        self.answers: list = []
        self.poll_until(lambda: self.answers.extend(receive(channel)) or self.answers)
        return channel, self.answers[0]

    def close(self):
        for agent in self.agents:
            agent.drop()
        self.nodes.close()


def receive(channel):
    try:
        return channel.receive()
    except EOFError:
        return []


@pytest.fixture
def run():
    made = Run()
    yield made
    made.close()


def test_agents_get_the_free_nodes_in_order(run):
    channels = []
    for node in (1, 2):
        channel, answer = run.connect()
        assert answer == {"do": "prepare", "node": node}
        channel.send({"is": "prepared", "problems": []})
        run.poll_until(lambda wanted=node: wanted in run.present)
        channels.append(channel)
    late, answer = run.connect()
    assert (answer["do"], answer["reason"]) == ("refuse", "all 3 nodes of the run have an agent")
    for channel in (*channels, late):
        channel.close()


def test_an_agent_that_was_lost_gets_its_node_back(run):
    channel, answer = run.connect(run="run-7", node=2)
    assert answer == {"do": "prepare", "node": 2}
    channel.close()
    channel, answer = run.connect(run="another", node=2)
    assert answer == {"do": "prepare", "node": 1}
    channel.close()


@pytest.mark.parametrize(("name", "version"), [("meshwright", "0.0.1"), ("torch", "1.0")])
def test_another_version_is_refused(run, name, version):
    channel, answer = run.connect(**{name: version})
    assert answer["do"] == "refuse"
    assert f"{name} {version} there" in answer["reason"]
    channel.close()


def test_a_node_with_a_problem_is_reported_and_does_not_join(run):
    channel, _ = run.connect()
    channel.send({"is": "prepared", "problems": [{"code": "node-data"}]})
    run.poll_until(lambda: run.reports)
    assert run.reports == [{"is": "node_refused", "node": 1, "problems": [{"code": "node-data"}]}]
    assert run.present == {0}
    channel.close()


def test_messages_before_the_preparation_are_ignored(run):
    """An agent cannot report for a node that it does not have."""
    channel, _ = run.connect()
    channel.send({"is": "exited", "rank": 0, "status": 0})
    channel.send({"is": "prepared", "problems": []})
    run.poll_until(lambda: 1 in run.present)
    assert run.reports == []
    channel.close()


def test_only_agents_of_the_same_run_are_adopted():
    run = Run(adopting=True)
    channel, answer = run.connect(run="another", node=1)
    assert answer["do"] == "refuse"
    channel.close()
    channel, answer = run.connect(run="run-7", node=1)
    assert answer == {"do": "adopt"}
    channel.close()
    run.close()


def test_a_node_is_named_with_its_host():
    assert (name_node(1, "b"), name_node(0, "")) == ("node 1 (b)", "node 0")
