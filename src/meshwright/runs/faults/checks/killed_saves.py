"""Fault tests 10 and 11: all ranks that save a checkpoint are killed at random times."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from meshwright.runs.faults.checks.check import CheckRun, require
from meshwright.runs.faults.checks.small_checkpoints import (
    WRITERS,
    Writers,
    fill_tensors,
    require_good,
    save,
)

KILLS = 50
LATEST = 1.5
"""A kill comes at most this many times the length of a save after its start."""


def measure_save(root: Path) -> float:
    """Seconds that an undisturbed save takes: the shortest of three."""
    seconds = []
    for step in range(3):
        started = time.monotonic()
        require(Writers(root, step, 0.0).wait() == [0] * WRITERS, "an undisturbed save failed")
        seconds.append(time.monotonic() - started)
    return min(seconds)


def check_new_steps(check: CheckRun, kills: int = KILLS) -> None:
    """Step 4 is saved after step 2: one of both is whole, and no draft stays."""
    length, seen = measure_save(check.folder / "timed"), list[float]()
    for number in range(kills):
        root = check.folder / f"{number}"
        save(root, WRITERS, step=2, tensors=fill_tensors(2.0))
        writers = Writers(root, 4, 4.0)
        time.sleep(check.random.uniform(0, LATEST * length))
        writers.kill(check.random)
        seen.append(require_good(root, {2.0, 4.0}))
        require(not list(root.glob(".step-*.part")), "a draft is left after the successor's clean-up")
        shutil.rmtree(root)
    _report(check, kills, committed=seen.count(4.0))


def check_same_step(check: CheckRun, kills: int = KILLS) -> None:
    """The same step again and again, with other values; the older revision is removed on the way."""
    length, newest, replaced = measure_save(check.folder / "timed"), 0.0, 0
    root = check.folder / "root"
    save(root, WRITERS, step=4, tensors=fill_tensors(newest))
    for number in range(1, kills + 1):
        writers = Writers(root, 4, float(number))
        time.sleep(check.random.uniform(0, LATEST * length))
        writers.kill(check.random)
        before = newest
        newest = require_good(root, {before, float(number)})
        replaced += newest != before
    _report(check, kills, committed=replaced)


def _report(check: CheckRun, kills: int, committed: int) -> None:
    """With enough kills, some come before the commit and some after it; otherwise nothing was tested."""
    if kills >= KILLS:
        require(0 < committed < kills, "all kills came too early, or too late")
    check.count("kills", kills)
    check.count("after the commit", committed)
