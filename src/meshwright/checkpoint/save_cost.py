"""Measures what a save costs training, and with ``checkpoint.auto`` sets the interval by it.

Steps take longer while a thread writes a checkpoint: it needs CPU time, memory bandwidth and the disk. The
steps that overlap with a write are compared with the last steps outside of writes.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from meshwright.layout.checkpoint_interval import FailureRate, IntervalChoice, SaveCost, choose_interval

OUTSIDE_STEPS = 32
"""The last steps outside of writes, whose median steps during a write are compared with."""
STEPS_BEFORE_FIRST_SAVE = 10
"""With ``checkpoint.auto``: the first save measures its cost, and comes after so many steps."""
RETRY_S = 1800.0
"""With ``checkpoint.auto``: interval as long as no save was committed, such as on a full disk."""
LAST_COSTS = 5
"""The interval is that of the median of so many costs."""
CHANGE = 1.5
"""An interval that differs from the one in use by less than this factor is not adopted."""


@dataclass(frozen=True)
class Slowdown:
    """How much longer steps took while a checkpoint was written."""

    factor: float | None
    """Median step time during the write over that outside; None if there was no such step."""
    seconds: float
    """Sum of the extra time of the steps during the write."""


class StepTimes:
    """Times of steps during a write, and outside of writes."""

    def __init__(self) -> None:
        self._outside: deque[float] = deque(maxlen=OUTSIDE_STEPS)
        self._during: list[float] = []
        self.counted = 0
        """Steps outside of writes so far."""

    def add(self, step_s: float, during_write: bool) -> None:
        """Count a step; during a write if any part of the step was."""
        if during_write:
            self._during.append(step_s)
        else:
            self._outside.append(step_s)
            self.counted += 1

    def end_write(self) -> Slowdown:
        """The slowdown of the write that has ended."""
        during, self._during = self._during, []
        if not during or not self._outside:
            return Slowdown(None, 0.0)
        usual, slowed = statistics.median(self._outside), statistics.median(during)
        return Slowdown(slowed / usual, len(during) * max(0.0, slowed - usual))


class AutoInterval:
    """The interval of ``checkpoint.auto``. Rank 0 applies it, and all ranks save together."""

    def __init__(self, failures: FailureRate) -> None:
        """Start without an interval: the first save is measured first.

        Args:
            failures: Failures of the run.
        """
        self._failures = failures
        self._costs: deque[SaveCost] = deque(maxlen=LAST_COSTS)
        self._choice: IntervalChoice | None = None

    def is_due(self, since_s: float, has_saved: bool, steps: int) -> bool:
        """Whether a save is due.

        Args:
            since_s: Since the end of the last save.
            has_saved: Whether a save was begun before.
            steps: Done so far, without untypical ones.
        """
        if self._choice is not None:
            return since_s >= self._choice.interval_s
        return since_s >= RETRY_S if has_saved else steps >= STEPS_BEFORE_FIRST_SAVE

    def measure(self, cost: SaveCost) -> IntervalChoice | None:
        """Take in the cost of a save; returns the interval if it is a new one."""
        self._costs.append(cost)
        typical = SaveCost(
            statistics.median(cost.blocked_s for cost in self._costs),
            statistics.median(cost.slowed_s for cost in self._costs),
            statistics.median(cost.commit_s for cost in self._costs),
        )
        choice = choose_interval(typical, self._failures)
        if self._choice is not None and 1 / CHANGE < choice.interval_s / self._choice.interval_s < CHANGE:
            return None
        self._choice = choice
        return choice
