"""The agent of a node with a real process, without training."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from file_limits import no_free_fd
from meshwright.launch.agent import Agent, _Process
from meshwright.launch.channel import Channel, connected_pair
from meshwright.launch.local import LocalAgent

RANK = """
import threading

def collect_replies(run_dir, link):
    replies, all_here = [], threading.Event()

    def answer(reply):
        replies.append(reply)
        if reply["last"]:
            all_here.set()

    link.requests.answer = answer
    link({"event": "up"})
    all_here.wait()
    link({"event": "done", "replies": len(replies)})
    return 0
"""

AGENT = """
import os, select, signal, sys
from meshwright.launch.local import LocalAgent
from meshwright.launch.rank_process import RankCommand

COUNT, LIMIT_S = 64, 20
received = []

def wait_for(wanted):
    while True:
        while received:
            message = received.pop(0)
            if wanted in (message["is"], message.get("event", {}).get("event")):
                return message
        assert select.select([agent], [], [], LIMIT_S)[0], f"no {wanted} within {LIMIT_S} s"
        received.extend(agent.receive())

def send_replies():
    command = RankCommand("join", 0).as_dict()
    start_arguments = {"entry": "rank:collect_replies", "run_dir": ".", "environment": {}, "log": "rank.log"}
    start = {"do": "start", "rank": 0, "command": command, "keep_snapshots": False, "layout_generation": 0}
    agent.send({**start, **start_arguments})
    pid = wait_for("up")["pid"]
    os.kill(pid, signal.SIGSTOP)
    for number in range(COUNT):
        reply = {"id": number, "text": "x" * 2**16, "last": number == COUNT - 1}
        agent.send({"do": "reply", "rank": 0, "reply": reply})
    agent.send({"do": "list_snapshots"})
    wait_for("snapshots")  # the agent has handled all messages before
    os.kill(pid, signal.SIGCONT)
    assert wait_for("done")["event"]["replies"] == COUNT
    assert wait_for("exited")["status"] == 0

agent = LocalAgent.start(("meshwright.launch.forkserver_preload",))
try:
    send_replies()
finally:
    agent.close()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses pidfd")
def test_messages_to_a_rank_that_was_stopped_arrive_when_it_goes_on(tmp_path: Path):
    """The socket of the stopped process is full. Nothing more is sent, and nothing else happens."""
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "agent.py").write_text(AGENT)
    done = subprocess.run(
        [sys.executable, "agent.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def agent(tmp_path: Path):
    """An agent and the supervisor's end of their connection."""
    channel, there = connected_pair()
    agent = Agent(channel, store_dir=str(tmp_path), orphan_s=60)
    agent._attach(channel)
    yield agent, Channel(there)
    for key in list(agent.selector.get_map().values()):
        if isinstance(key.fileobj, Channel):
            key.fileobj.close()
    agent.selector.close()
    there.close()


def add_rank(agent: Agent, rank: int, pid: int) -> Channel:
    """Let the agent have a rank; returns the rank's end of the link."""
    here, there = socket.socketpair()
    here.setblocking(False)
    process = _Process(pid, -1, Channel(here), rank)
    agent.processes.append(process)
    agent.selector.register(process.channel, selectors.EVENT_READ, partial(agent._read_rank, process))
    return Channel(there)


def test_a_rank_that_ended_is_reported_before_what_the_others_report(agent):
    """Both are seen at once. The process that ended is the cause, so its exit comes first."""
    agent, supervisor = agent
    with subprocess.Popen(["sleep", "60"]) as alive, subprocess.Popen(["false"]) as dead:
        survivor, victim = add_rank(agent, 0, alive.pid), add_rank(agent, 1, dead.pid)
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
        survivor.send({"is": "failed", "message": "Socket closed"})
        victim.send({"is": "event", "event": {"event": "step"}})
        assert agent._serve()
        alive.kill()
    reports = [(message["is"], message["rank"]) for message in supervisor.receive()]
    assert reports == [("event", 1), ("exited", 1), ("failed", 0)]
    survivor.close()
    victim.close()


def test_reports_in_the_moment_the_supervisor_dies_are_kept_for_the_next_one(agent):
    """The event cannot be sent any more. The failure behind it, and an exit, are kept; the ranks go on."""
    agent, supervisor = agent
    with subprocess.Popen(["sleep", "60"]) as alive, subprocess.Popen(["false"]) as dead:
        survivor, victim = add_rank(agent, 0, alive.pid), add_rank(agent, 1, dead.pid)
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
        for link in (survivor, victim):
            link.send({"is": "event", "event": {"event": "step"}})
        survivor.send({"is": "failed", "message": "Socket closed"})
        supervisor.close()
        assert agent._serve()
        assert agent._serve(), "the ranks go on without a supervisor"
        alive.kill()
    assert [(message["is"], message["rank"]) for message in agent.unreported] == [("failed", 0)]
    assert agent.exits.keys() == {1}
    survivor.close()
    victim.close()


@pytest.mark.parametrize("others_train", [True, False])
def test_an_idle_agent_waits_for_a_new_supervisor_only_if_other_nodes_have_ranks(agent, others_train):
    """Otherwise ``train --resume`` would find no agent, and start ranks beside those that train."""
    agent, supervisor = agent
    supervisor.send({"do": "begin_layout", "generation": 2, "others_train": others_train})
    assert agent._serve()
    assert supervisor.receive()[0]["is"] == "retired"
    supervisor.close()
    assert agent._serve() is others_train


def test_an_agent_whose_ranks_stop_is_waited_for(agent, tmp_path: Path):
    """It refuses a new supervisor, which then finds that it has ended: no rank is left."""
    agent, supervisor = agent
    supervisor.send({"do": "configure", "run_dir": str(tmp_path), "orphan_s": 60})
    supervisor.send({"do": "begin_layout", "generation": 2, "others_train": True})
    while not agent.others_train:
        assert agent._serve()
    supervisor.close()
    assert agent._serve()
    agent.deadline = 0.0
    assert agent._serve(), "ranks of other nodes have time to save"
    assert agent.stopping

    waits = []
    with ThreadPoolExecutor(1) as thread:
        adopted = thread.submit(LocalAgent.adopt, tmp_path, lambda: waits.append(True))
        while not waits:
            assert agent._serve()
        agent.selector.unregister(agent.listener)
        agent.listener.close()
        assert adopted.result(timeout=30) is None
    assert waits == [True]


def test_an_agent_without_free_file_descriptors_keeps_its_ranks(agent, tmp_path: Path):
    """A new supervisor waits, and adopts the ranks when there is a file descriptor again."""
    agent, supervisor = agent
    supervisor.send({"do": "configure", "run_dir": str(tmp_path), "orphan_s": 60})
    supervisor.send({"do": "begin_layout", "generation": 2, "others_train": True})
    while not agent.others_train:
        assert agent._serve()
    supervisor.close()
    assert agent._serve()
    with socket.socket(socket.AF_UNIX) as other:
        with no_free_fd():
            other.connect(agent.listener.getsockname())
            assert agent._serve()
            assert agent.selector.select(0) == [], "nothing wakes it"
        other.sendall(b"no token\n")
        while agent.acceptor.resume_at is not None:
            assert agent._serve()
        assert agent._serve()
        other.settimeout(10)
        assert other.recv(1) == b"", "it is heard and refused"
    agent.listener.close()
