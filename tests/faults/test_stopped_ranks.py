"""A rank is stopped (SIGSTOP) in a given phase. Another process takes over; the stopped one rejoins.

RELIABILITY test 5: the rank is named within 5 s, the others go on within 10 s, and after SIGCONT the process
rejoins and commits nothing twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from meshwright.core.flight_ring import FlightMemory
from saved_checkpoints import require_equal_files

NAMED_WITHIN_S = 5.0
GO_ON_WITHIN_S = 10.0
OPTIONS = ("layout.dp_replicate=2", "elastic.snapshot_every=5", "checkpoint.every_steps=5")
PHASES = (
    "waiting for data",
    "forward",
    "backward",
    "update",
    "control all-reduce",
    "evaluation",
    "checkpoint",
)
SUPERVISOR_EVENTS = ("hang", "rank_lost", "recovered", "rejoined")
SEED = 5


class StoppedRun:
    """A run whose ranks are stopped one after another."""

    def __init__(self, running, run_dir):
        self.running, self.run_dir = running, run_dir

    def events(self, name):
        return [e for e in self.running.events(self.run_dir) if e["event"] == name]

    def last_start(self, rank):
        """The ``started`` event of the rank's newest process."""
        return [e for e in self.events("started") if e["rank"] == rank][-1]

    def wait_for_steps(self, count=3):
        """Wait until the newest generation has trained some steps."""
        generation = max(e["generation"] for e in self.running.events(self.run_dir))
        first = next(e["step"] for e in self.events("ready") if e["generation"] == generation)
        self.running.wait_for(
            self.run_dir,
            lambda e: e["event"] == "step" and e["generation"] == generation and e["step"] >= first + count,
        )

    def stop_in(self, phase, rank):
        """SIGSTOP a rank inside a phase; returns its pid."""
        start = self.last_start(rank)
        memory = FlightMemory.open(start["flight_recorder"])
        deadline = time.monotonic() + 60
        with contextlib.closing(memory):
            while time.monotonic() < deadline:
                if memory.progress().phase == phase:
                    os.kill(start["pid"], signal.SIGSTOP)
                    _wait_until_stopped(start["pid"])
                    if memory.progress().phase == phase:
                        return start["pid"]
                    os.kill(start["pid"], signal.SIGCONT)
                time.sleep(0.0002)  # a phase may take a millisecond
        raise AssertionError(f"rank {rank} was never seen in {phase}")

    def require_recovery(self, stopped_at, rank, recoveries):
        """The rank is named and replaced in time."""
        self.running.wait_for(self.run_dir, lambda _: len(self.events("hang")) == recoveries)
        named_s = time.monotonic() - stopped_at
        hang = self.events("hang")[-1]
        assert (hang["cause"], hang["rank"]) == ("stopped", rank)
        assert named_s <= NAMED_WITHIN_S
        self.running.wait_for(self.run_dir, lambda _: len(self.events("recovered")) == recoveries)
        assert time.monotonic() - stopped_at <= GO_ON_WITHIN_S
        recovered = self.events("recovered")[-1]
        assert recovered["failed_rank"] == rank
        assert "fenced" in recovered["how"] or "killed" in recovered["how"]
        return recovered

    def wake(self, pid):
        """SIGCONT; returns the pid of the process that rejoins as a spare.

        It is another one if the process was stopped while gloo received a message: gloo does not end this
        wait, and the process exits.
        """
        before = len(self.events("rejoined"))
        os.kill(pid, signal.SIGCONT)
        self.running.wait_for(self.run_dir, lambda _: len(self.events("rejoined")) > before)
        rejoined = self.events("rejoined")[before]
        assert rejoined["former_pid"] == pid
        return rejoined["pid"]


def _wait_until_stopped(pid):
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.0001)


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def require_no_double_commit(events):
    """The ledger: no rank writes for an old generation after a newer one, and no step twice in one."""
    newest, committed = {}, set()
    for event in events:
        if event["event"] in SUPERVISOR_EVENTS:
            continue
        rank, generation = event["rank"], event["generation"]
        assert generation >= newest.get(rank, 0), f"written after generation {newest[rank]} began: {event}"
        newest[rank] = generation
        if event["event"] in ("step", "checkpoint", "eval"):
            key = (event["event"], rank, generation, event["step"])
            assert key not in committed, f"committed twice: {event}"
            committed.add(key)


def require_equal_runs(undisturbed, running, run_dir, steps):
    """Losses, audit and final checkpoint are those of a calm run; returns the events."""
    status, out, err = running.finish(240)
    assert status == 0, err
    result = json.loads(out)
    assert result["losses"] == undisturbed.losses
    assert result["audit_ok"], result["differences"]
    require_equal_files(
        *(folder / f"checkpoints/step-{steps:08d}" for folder in (run_dir, undisturbed.run_dir))
    )
    events = running.events(run_dir)
    require_no_double_commit(events)
    assert not list((run_dir / "checkpoints").glob(".*")), "no draft is left"
    return events


def test_a_stopped_rank_rejoins_and_commits_nothing_twice(command, train, job_file, tmp_path):
    """Rank 1 is stopped in forward and rejoins as a spare. Then rank 0 is stopped while it saves.

    The first process takes over rank 0 without a fork.
    """
    steps, run_dir = 150, tmp_path / "run"
    options = (*OPTIONS, f"train.steps={steps}", "elastic.heartbeat_timeout_s=3")
    running = command("train", job_file, *options, f"run_dir={run_dir}", "--json")
    run = StoppedRun(running, run_dir)
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 7)
    pids = []
    for number, (phase, rank) in enumerate([("forward", 1), ("checkpoint", 0)], start=1):
        pids.append(run.stop_in(phase, rank))
        run.require_recovery(time.monotonic(), rank, number)
        assert run.wake(pids[-1]) == pids[-1]
    assert run.last_start(0)["pid"] == pids[0], "the process that rejoined is used first"
    undisturbed = train(*options, "run_dir=calm")
    events = require_equal_runs(undisturbed, running, run_dir, steps)
    assert not any(_is_running(e["pid"]) for e in events if e["event"] == "started")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_that_are_stopped_in_ten_phases_rejoin(command, train, job_file, tmp_path):
    """Each phase once and three more, in random order. The first process stays stopped until the end.

    Rank 0 saves, so it is the one that is stopped in a save.
    """
    steps, run_dir = 400, tmp_path / "run"
    options = (*OPTIONS, f"train.steps={steps}", "train.eval_every=5")
    chance = random.Random(SEED)
    plan = [(phase, 0 if phase == "checkpoint" else chance.randrange(2)) for phase in PHASES]
    plan += [(phase, 1 - rank) for phase, rank in plan[1:4]]
    chance.shuffle(plan)
    running = command("train", job_file, *options, f"run_dir={run_dir}", "--json")
    run = StoppedRun(running, run_dir)
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 7)
    pids = []
    for number, (phase, rank) in enumerate(plan, start=1):
        pids.append(run.stop_in(phase, rank))
        recovered = run.require_recovery(time.monotonic(), rank, number)
        run.wait_for_steps()
        if number > 1 and "fenced" in recovered["how"]:
            assert run.wake(pids[-1]) is not None
    assert run.wake(pids[0]) is None, "there is a spare, so it ends"
    undisturbed = train(*options, "run_dir=calm")
    events = require_equal_runs(undisturbed, running, run_dir, steps)
    assert not any(_is_running(e["pid"]) for e in events if e["event"] == "started")
