"""The agent of a node with a real process, without training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
from meshwright.launch.rank_process import Order

COUNT, LIMIT_S = 64, 20

def wait_for(wanted):
    while True:
        assert select.select([agent], [], [], LIMIT_S)[0], f"no {wanted} within {LIMIT_S} s"
        for message in agent.receive():
            if wanted in (message["is"], message.get("event", {}).get("event")):
                return message

def send_replies():
    order = Order("join", 0).as_dict()
    recipe = {"entry": "rank:collect_replies", "run_dir": ".", "environment": {}, "log": "rank.log"}
    agent.send({"do": "start", "rank": 0, "order": order, "keep_snapshots": False, **recipe})
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
