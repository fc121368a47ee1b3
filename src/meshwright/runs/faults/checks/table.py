"""The fault tests without a schedule: number, name, pass criterion, and the function that runs them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from meshwright.runs.faults.checks.check import CheckRun

PACKAGE = "meshwright.runs.faults.checks"
QUICK_S = 10.0


@dataclass(frozen=True)
class Check:
    """One of the reliability tests."""

    number: int
    name: str
    criterion: str
    entry: str
    """``module:function`` in this package, called with a ``CheckRun``. Some import torch."""
    seconds: float
    """What it takes on a machine with 2 cores."""

    @property
    def is_quick(self) -> bool:
        """Whether it runs before the tests with schedules."""
        return self.seconds <= QUICK_S

    def load(self) -> Callable[[CheckRun], None]:
        """The function."""
        module, _, name = self.entry.partition(":")
        function: Callable[[CheckRun], None] = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)
        return function


CHECKS = (
    Check(
        10,
        "kill-save",
        "kill -9 of 4 writers of a new step, 50 times: the newest checkpoint is whole",
        "killed_saves:check_new_steps",
        10.0,
    ),
    Check(
        11,
        "kill-replace",
        "kill -9 of 4 writers of the same step, 50 times: the old or the new one is whole",
        "killed_saves:check_same_step",
        8.0,
    ),
    Check(
        12,
        "truncate",
        "each file truncated to 0, 50 and 99.9%: named, and the previous checkpoint is used",
        "broken_files:check_truncation",
        2.0,
    ),
    Check(
        13,
        "flip-bits",
        "200 random bits in all files: all found before a tensor is read",
        "broken_files:check_flipped_bits",
        3.0,
    ),
    Check(
        14,
        "mix-files",
        "manifest and shards of two saves, shards of two ranks swapped: refused",
        "broken_files:check_mixed_files",
        2.0,
    ),
    Check(
        15,
        "full-disk",
        "a disk full at each page, failing calls: the reason, the old one intact, training goes on",
        "failing_disk:check_failing_disk",
        40.0,
    ),
    Check(
        16,
        "malicious-checkpoint",
        "26 attacks, 5 commands: refused with a reason, no code runs, no file changes, memory bounded",
        "malicious:check_malicious",
        60.0,
    ),
    Check(
        17,
        "two-writers",
        "a second run is refused with process and host, until the first one and its ranks are killed",
        "two_writers:check_two_writers",
        30.0,
    ),
    Check(
        18,
        "reshard",
        "4, 3, 1, 2 and 4 ranks: tensors and position bit-identical, the next 20 losses equal",
        "resharding:check_resharding",
        90.0,
    ),
    Check(
        19,
        "rotate",
        "kill -9 at each system call of a save with rotation: a verified checkpoint is always there",
        "rotation:check_rotation",
        30.0,
    ),
    Check(
        21,
        "partition",
        "a node cut off, one-way loss, a minority: it commits nothing, the majority goes on in 15 s",
        "partitions:check_partitions",
        300.0,
    ),
    Check(
        22,
        "delay",
        "200 ms round trip, 1% stalls, connections reset: no false death, same losses and parameters",
        "delays:check_delays",
        150.0,
    ),
)
