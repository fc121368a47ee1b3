"""The agent of another node, between a supervisor and a local agent that are played."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from meshwright.elastic.node_agent import NodeAgent
from meshwright.launch.channel import Channel, connected_pair

PREPARE = {"do": "prepare", "run": "r", "node": 1, "name": "run", "orphan_s": 60.0, "session": "first"}
EVENT = {"is": "event", "rank": 1, "pid": 7, "event": {"event": "step", "rank": 1, "step": 3}}


class PlayedAgent:
    """The local agent: the test sends as it."""

    def __init__(self):
        self.channel, there = connected_pair()
        self.there, self.sent = Channel(there), []
        self.fileno, self.receive = self.channel.fileno, self.channel.receive

    def send(self, message):
        self.sent.append(message)

    def close(self):
        self.channel.close()
        self.there.close()


class Setup:
    """The run folder of the node. ``prepare`` waits for the test, if it is told to."""

    def __init__(self):
        self.notes, self.may_go_on = [], threading.Event()
        self.may_go_on.set()

    def prepare(self, command):
        assert self.may_go_on.wait(30)
        return Path("run"), []

    def notify(self, text):
        self.notes.append(text)


class Node:
    """A node agent that has joined."""

    def __init__(self):
        here, there = connected_pair()
        self.supervisor, self.local, self.setup = Channel(there), PlayedAgent(), Setup()
        self.agent = NodeAgent(lambda: pytest.fail("no loss"), lambda: self.local, self.setup, torch="2.13")
        self.agent._attach(here)
        assert self.supervisor.receive()[0]["is"] == "join"

    def tell(self, message):
        self.supervisor.send(message)
        self.agent._serve()

    def told(self):
        """What the supervisor got, without reports of flight recorders."""
        self.supervisor.setblocking(False)
        found = self.supervisor.receive()
        return [message for message in found if message["is"] != "watch"]

    def close(self):
        self.agent._end_agent()
        self.agent._supervisor.close()
        self.agent._selector.close()
        self.supervisor.close()
        self.local.close()


@pytest.fixture
def node():
    made = Node()
    yield made
    made.close()


def test_a_spare_leaves_at_the_first_signal(node):
    node.tell({"do": "wait_as_spare", "run": "r", "orphan_s": 0.0})
    node.agent.stops.append(signal.SIGTERM)
    node.agent._serve()
    assert node.told() == [{"is": "leave"}]
    assert node.agent._outcome is True


@pytest.mark.parametrize(("number", "request_"), [(signal.SIGTERM, "leave"), (signal.SIGINT, "stop")])
def test_sigterm_takes_the_node_out_and_ctrl_c_stops_the_run(node, number, request_):
    node.tell(PREPARE)
    node.told()
    node.agent.stops.append(number)
    node.agent._serve()
    assert node.told() == [{"is": request_}]
    assert node.agent._outcome is None, "its ranks have not ended"
    node.tell({"do": "end", "ok": True, "left": number == signal.SIGTERM})
    assert node.agent._outcome is True


def test_a_node_that_prepares_for_long_shows_that_it_is_there(node):
    """The supervisor takes an agent that sends nothing for 6 s for lost."""
    node.setup.may_go_on.clear()
    preparing = threading.Thread(target=node.tell, args=(PREPARE,))
    preparing.start()
    node.supervisor.socket.settimeout(10)
    try:
        assert node.supervisor.receive()[0]["is"] == "watch"
    finally:
        node.setup.may_go_on.set()
    preparing.join(30)
    assert [message["is"] for message in node.told()] == ["prepared"]


def test_a_new_supervisor_gets_what_the_one_before_may_not_have_handled(node):
    """An event is sent again until it is acknowledged, and marked: it may be written already."""
    node.tell(PREPARE)
    node.agent._ranks = {1}
    node.local.there.send(EVENT)
    node.agent._serve()
    assert EVENT in node.told()
    node.tell({"do": "adopt", "session": "second"})
    assert {**EVENT, "again": True} in node.told()
    received = node.agent._session._sent
    node.tell({"do": "ack", "received": received})
    node.tell({"do": "adopt", "session": "third"})
    assert [message["is"] for message in node.told()] == ["adopted", "recorder"]


def test_a_new_supervisor_is_told_that_the_node_leaves(node):
    """The one before may have died before it handled the signal."""
    node.tell(PREPARE)
    node.agent.stops.append(signal.SIGTERM)
    node.agent._serve()
    assert node.told()[-1] == {"is": "leave"}
    node.tell({"do": "adopt", "session": "second"})
    assert [message["is"] for message in node.told()] == ["adopted", "leave"]
