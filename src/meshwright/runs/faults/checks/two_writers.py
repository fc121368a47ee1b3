"""Fault test 17: two runs write to one folder of checkpoints."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.stores import find_newest
from meshwright.launch.agent_file import AgentFile
from meshwright.runs.faults.checks.check import CheckRun, require
from meshwright.runs.faults.checks.running_command import commands
from meshwright.runs.faults.job import TinyJob

BUSY = "[checkpoint-dir-busy]"
ONE_RANK = ("layout.dp_replicate=1", "checkpoint.every_steps=2")


def check_two_writers(check: CheckRun) -> None:
    """A second run is refused until the first one is killed with its ranks; then the lock is free.

    The folder is in the run folder of the first, and the second names it by a link. First the command is
    killed, and the ranks go on. Then they are killed too.
    """
    job, folder = TinyJob.write(check.folder).file, check.folder.resolve()
    root, link = folder / "run" / "checkpoints", folder / "link"
    link.symlink_to(root)
    again = ("train", job, *ONE_RANK, "--resume", f"checkpoint.dir={link}", "run_dir=other")
    with commands(folder) as start:
        first = start("train", job, *ONE_RANK, "run_dir=run")
        pid = first.wait_for(folder / "run", lambda e: e["event"] == "started")["pid"]
        first.wait_for(folder / "run", lambda e: e["event"] == "checkpoint")
        status, _, err = start(*again, "train.steps=100001").finish()
        owner = f"process {first.process.pid} on {socket.gethostname()}"
        require(status == 2 and BUSY in err and owner in err, f"status {status}, {owner} not named: {err}")
        require(not (folder / "other").exists(), "the refused run left a folder")
        first.process.kill()
        first.process.wait(30)
        status, _, err = start(*again, "train.steps=100001").finish()
        named = f"the ranks of {folder / 'run'}" in " ".join(err.split())
        require(status == 2 and BUSY in err and named, f"status {status}, the ranks still train: {err}")
        _kill_ranks(folder / "run", pid)
        found = find_newest(root)
        require(found is not None, "no checkpoint is found")
        assert found is not None, "required before"
        steps = read_manifest(found[0]).step + 10  # a draft with all votes may be committed too
        status, _, err = start(*again, f"train.steps={steps}").finish()
        require(status == 0, f"the lock of a killed run is not free: {err}")
    check.count("refused", 2)
    check.count("reclaimed", 1)


def _kill_ranks(run_dir: Path, pid: int) -> None:
    agent = AgentFile.read(run_dir)
    require(agent is not None, "the run has no agent")
    assert agent is not None, "required before"
    for victim in (agent.pid, pid):
        os.kill(victim, signal.SIGKILL)
