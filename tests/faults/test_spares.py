"""A warm spare process takes over the rank of a killed one, and the pool is filled up again."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

OPTIONS = ("layout.dp_replicate=2", "elastic.snapshot_every=5", "elastic.spares=1")


def children_of_agent(run_dir):
    agent = json.loads((run_dir / "agent.json").read_text())["pid"]
    return {int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()}


def wait_for_children(run_dir, count):
    deadline = time.monotonic() + 30
    while len(found := children_of_agent(run_dir)) != count:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def started(running, run_dir):
    return {e["pid"]: e["rank"] for e in running.events(run_dir) if e["event"] == "started"}


def test_a_spare_takes_over_a_killed_rank(command, train, job_file, tmp_path):
    """No process is forked for the rank. The losses are those of a calm run. No process is left."""
    run_dir = tmp_path / "run"
    options = (*OPTIONS, "train.steps=120")
    running = command("train", job_file, *options, f"run_dir={run_dir}", "--json")
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 12)
    (spare,) = wait_for_children(run_dir, 3) - started(running, run_dir).keys()
    ranks = {rank: pid for pid, rank in started(running, run_dir).items()}
    os.kill(ranks[1], signal.SIGKILL)
    running.wait_for(run_dir, lambda e: e["event"] == "recovered")
    assert started(running, run_dir)[spare] == 1
    everyone = wait_for_children(run_dir, 3) | {spare}
    assert len(everyone - started(running, run_dir).keys()) == 1, "a new spare"
    undisturbed = train(*options, "run_dir=calm")
    status, out, err = running.finish()
    assert status == 0, err
    assert json.loads(out)["losses"] == undisturbed.losses
    assert not any(Path(f"/proc/{pid}").exists() for pid in everyone)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_spare_that_is_stopped_or_dead_is_not_used(command, job_file, tmp_path, number):
    """The agent forks a process instead. A stopped spare is killed at the end."""
    run_dir = tmp_path / "run"
    running = command("train", job_file, *OPTIONS, "train.steps=100000", f"run_dir={run_dir}")
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 12)
    (spare,) = wait_for_children(run_dir, 3) - started(running, run_dir).keys()
    ranks = {rank: pid for pid, rank in started(running, run_dir).items()}
    os.kill(spare, number)
    os.kill(ranks[1], signal.SIGKILL)
    running.wait_for(run_dir, lambda e: e["event"] == "recovered")
    assert spare not in started(running, run_dir)
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["generation"] == 1)
    running.process.send_signal(signal.SIGINT)
    status, _, err = running.finish()
    assert status == 130, err
    assert not Path(f"/proc/{spare}").exists()
