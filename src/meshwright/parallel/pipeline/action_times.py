"""Mean start and end time of each action of a rank, over the steps that are timed.

Times count from the start of the rank's step. Ranks start a step together: the last thing of a step is the
control all-reduce. Waiting for another rank's result is not part of an action. On a GPU the times are CUDA
events, read after the step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from meshwright.schedule.pipeline.actions import Action

MAX_TIMED_STEPS = 50
"""Steps that are timed: enough for a mean. Every timed step synchronizes the GPU."""


class ActionTimes:
    """The times of one rank's actions."""

    def __init__(self, actions: Sequence[Action], device: torch.device) -> None:
        self._actions, self._gpu = actions, device.type == "cuda"
        self._timestamps: list[Any] = []
        self._sums = [0.0] * (2 * len(actions))
        self.steps = 0
        """Steps in the mean."""
        self.is_timed = True
        """Whether the current step is timed."""

    def begin(self) -> None:
        """Start a step."""
        self._timestamps = [self._now()]

    def start(self) -> None:
        """Start an action: its input has arrived."""
        self._timestamps.append(self._now())

    def end(self) -> None:
        """End an action."""
        self._timestamps.append(self._now())

    def finish(self) -> None:
        """End a step."""
        if not self.is_timed or self.steps == MAX_TIMED_STEPS:
            return
        origin, *timestamps = self._timestamps
        if self._gpu:
            torch.cuda.synchronize()
            passed = [origin.elapsed_time(timestamp) / 1e3 for timestamp in timestamps]
        else:
            passed = [timestamp - origin for timestamp in timestamps]
        self._sums = [before + now for before, now in zip(self._sums, passed, strict=True)]
        self.steps += 1

    def rows(self) -> list[list[Any]]:
        """Kind, stage, micro-batch, mean start and mean end of each action, in order."""
        means = [total / max(1, self.steps) for total in self._sums]
        return [
            [str(a.kind), a.stage, a.micro_batch, start, end]
            for a, start, end in zip(self._actions, means[::2], means[1::2], strict=True)
        ]

    def _now(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
