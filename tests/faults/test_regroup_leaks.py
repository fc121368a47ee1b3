"""A survivor of many regroups does not grow: file descriptors, threads, memory. The same for the agent."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

REGROUPS = 20
WARM_UP = 5
"""Regroups after which caches and allocators have their size."""
MOST_GROWTH_BYTES = 15 * 2**20


@dataclass(frozen=True)
class Footprint:
    """What a process holds."""

    fds: int
    threads: int
    resident_bytes: int

    @classmethod
    def of(cls, pid):
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        return cls(
            len(list(Path(f"/proc/{pid}/fd").iterdir())),
            int(status["Threads"]),
            int(status["VmRSS"].split()[0]) * 1024,
        )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_regroups_leak_nothing(command, job_file, tmp_path):
    run_dir = tmp_path / "run"
    options = ("layout.dp_replicate=2", "train.steps=100000", "elastic.snapshot_every=5")
    running = command("train", job_file, *options, f"run_dir={run_dir}")
    last_step = 0
    survivors, agents = [], []
    for generation in range(REGROUPS + 1):
        running.wait_for(
            run_dir,
            lambda e, now=generation, after=last_step: (
                e["event"] == "step" and (e["rank"], e["generation"]) == (0, now) and e["step"] > after + 6
            ),
        )
        events = running.events(run_dir)
        last_step = max(e["step"] for e in events if e["event"] == "step")
        pids = {e["rank"]: e["pid"] for e in events if e["event"] == "started"}
        survivors.append(Footprint.of(pids[0]))
        agents.append(Footprint.of(json.loads((run_dir / "agent.json").read_text())["pid"]))
        if generation < REGROUPS:
            os.kill(pids[1], signal.SIGKILL)
    running.process.send_signal(signal.SIGINT)
    assert running.finish()[0] == 130
    for footprints in (survivors, agents):
        warm, last = footprints[WARM_UP], footprints[-1]
        assert last.fds <= warm.fds, footprints
        assert last.threads <= warm.threads, footprints
        assert last.resident_bytes - warm.resident_bytes < MOST_GROWTH_BYTES, footprints
