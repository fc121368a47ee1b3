"""Which agents become a node of a run, which are spares, which go on after a reset, and which are refused."""

from __future__ import annotations

import threading
import time

import pytest

from meshwright.core.version import __version__
from meshwright.launch.join import JoinListener, join
from meshwright.launch.network import Address
from meshwright.launch.remote_nodes import RemoteNodes, name_node
from meshwright.launch.silence import SILENT_S, SilenceWatch

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
        self.joined: list = []

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
            self.joined = self.poll() or self.joined

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
        assert (answer["do"], answer["node"]) == ("prepare", node)
        prepare(run, channel, node)
        channels.append(channel)
    assert run.reports == []
    for channel in channels:
        channel.close()


def prepare(run, channel, node):
    channel.send({"is": "prepared", "problems": []})
    run.poll_until(lambda: node in run.present)


def test_an_agent_that_comes_when_all_nodes_have_one_gets_the_next_that_is_lost(run):
    """Two spares; the one that came first takes over."""
    channels = [run.connect()[0] for _ in range(2)]
    for node, channel in enumerate(channels, 1):
        prepare(run, channel, node)
    spares = []
    for count, host in enumerate(("c", "d"), 1):
        spare, answer = run.connect(host=host)
        assert answer == {"do": "wait_as_spare", "run": "run-7", "orphan_s": 0.0}
        spare.send({"is": "spare_ready"})
        spares.append(spare)
        run.poll_until(lambda wanted=count: len(run.reports) == wanted)
    assert [report["host"] for report in run.reports] == ["c", "d"]
    run.present.remove(2)
    run.answers = []
    run.poll_until(lambda: run.answers.extend(receive(spares[0])) or run.answers)
    assert (run.answers[0]["do"], run.answers[0]["node"]) == ("prepare", 2)
    prepare(run, spares[0], 2)
    assert receive(spares[1]) == [], "the other one still waits"
    run.nodes.close(ok=True)
    spares[1].setblocking(True)
    assert spares[1].receive() == [{"do": "end", "ok": True, "left": False}]
    for channel in (*channels, *spares):
        channel.close()


def add_spares(run, *hosts):
    """Give both nodes an agent, and let others wait as spares; returns the channels of all."""
    channels = [run.connect()[0] for _ in range(2)]
    for node, channel in enumerate(channels, 1):
        prepare(run, channel, node)
    for host in hosts:
        channels.append(run.connect(host=host)[0])
        channels[-1].send({"is": "spare_ready"})
    run.poll_until(lambda: run.nodes.spares == len(hosts))
    return channels


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self):
        return self.now


def test_a_spare_that_falls_silent_while_it_prepares_is_lost_and_the_next_one_gets_the_node(run):
    """A stopped process keeps its connection. After the limit of silence the other spare gets the node."""
    clock = Clock()
    run.nodes.silence = SilenceWatch(clock=clock)
    channels = add_spares(run, "c", "d")
    silent, other = channels[2:]
    run.present.remove(2)
    run.answers = []
    run.poll_until(lambda: run.answers.extend(receive(silent)) or run.answers)
    assert (run.answers[0]["do"], run.answers[0]["node"]) == ("prepare", 2)
    heard: list = []
    while not any(message["do"] == "prepare" for message in heard):
        assert clock.now <= SILENT_S + 1
        clock.now, known = clock.now + 1, len(heard)
        other.send({"is": "watch", "received": 0})
        run.poll_until(lambda known=known: heard.extend(receive(other)) or len(heard) > known)
    assert clock.now > SILENT_S, "within the limit the first one may still answer"
    lost = [report for report in run.reports if report["is"] == "spare_lost"]
    assert [(report["host"], report["reason"]) for report in lost] == [("c", "it sent nothing for 6 s")]
    prepare(run, other, 2)
    for channel in channels:
        channel.close()


def test_a_spare_that_leaves_is_no_longer_counted(run):
    channels = add_spares(run, "c", "d")
    channels[2].send({"is": "leave"})
    run.poll_until(lambda: run.nodes.spares == 1)
    (lost,) = [report for report in run.reports if report["is"] == "spare_lost"]
    assert (lost["host"], lost["reason"]) == ("c", "it was told to leave")
    for channel in channels:
        channel.close()


def test_a_spare_that_is_gone_is_forgotten(run):
    channels = [run.connect()[0] for _ in range(2)]
    for node, channel in enumerate(channels, 1):
        prepare(run, channel, node)
    gone, _ = run.connect()
    gone.close()
    run.poll_until(lambda: not run.nodes._spares)
    run.present.remove(1)
    run.poll()
    channel, answer = run.connect()
    assert (answer["do"], answer["node"]) == ("prepare", 1)
    for one in (*channels, channel):
        one.close()


def test_an_agent_whose_connection_broke_goes_on_with_its_session(run):
    """Another session, or that of a node that was given up, begins anew."""
    channel, answer = run.connect()
    prepare(run, channel, 1)
    (agent,) = run.agents
    agent.send({"do": "command", "number": 1})
    run.nodes.sessions[1] = answer["session"]
    again = {"run": "run-7", "node": 1, "session": answer["session"], "received": 0}
    stranger, answer = run.connect(**again | {"session": "another"})
    assert (answer["do"], answer["node"]) == ("prepare", 2)
    channel.close()
    found = dial(run, again)
    (joined,) = run.joined
    assert (joined.node, joined.received) == (1, 0)
    agent.disconnect()
    assert agent.resume(joined.agent, joined.received)
    found.setblocking(True)
    assert [message["do"] for message in receive_count(found, 2)] == ["resume", "command"]
    for one in (stranger, found):
        one.close()


def dial(run, message):
    """An agent that dials again; the listener reports it as joined."""
    found, run.joined = [], []
    thread = threading.Thread(target=lambda: found.append(join(run.listener.address, TOKEN, 5.0)))
    thread.start()
    run.poll_until(lambda: not thread.is_alive())
    hello = {"is": "join", "host": "b", "meshwright": __version__, "torch": "2.13"}
    found[0].send({**hello, **message})
    run.poll_until(lambda: run.joined)
    return found[0]


def receive_count(channel, count):
    messages = []
    while len(messages) < count:
        messages += channel.receive()
    return messages


def test_an_agent_that_was_lost_gets_its_node_back(run):
    channel, answer = run.connect(run="run-7", node=2)
    assert (answer["do"], answer["node"]) == ("prepare", 2)
    channel.close()
    channel, answer = run.connect(run="another", node=2)
    assert (answer["do"], answer["node"]) == ("prepare", 1)
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
    assert answer["do"] == "adopt"
    channel.close()
    run.close()


def test_a_node_is_named_with_its_host():
    assert (name_node(1, "b"), name_node(0, "")) == ("node 1 (b)", "node 0")
