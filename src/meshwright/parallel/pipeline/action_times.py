"""When each action of a rank began and ended, as the mean over the steps that count.

Times are those of the rank since its step began: ranks begin a step together, as the last thing in a step is
a reduction over all of them. Waiting for another rank's result is not a part of any action. On a GPU the host
only queues: the moments are events in its stream, read once the step is over.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from meshwright.schedule.pipeline.actions import Action

MAX_TIMED_STEPS = 50
"""Steps that are timed: enough for a mean, and a GPU is not asked to wait in all the others."""


class ActionTimes:
    """The moments of one rank's actions."""

    def __init__(self, actions: Sequence[Action], device: torch.device) -> None:
        self._actions, self._gpu = actions, device.type == "cuda"
        self._moments: list[Any] = []
        self._sums = [0.0] * (2 * len(actions))
        self.steps = 0
        """Steps that the mean is over."""
        self.counts = True
        """Whether the step at hand is one of them."""

    def begin(self) -> None:
        """A step begins."""
        self._moments = [self._now()]

    def start(self) -> None:
        """An action begins: what it needs is there."""
        self._moments.append(self._now())

    def end(self) -> None:
        """It ends."""
        self._moments.append(self._now())

    def finish(self) -> None:
        """The step's last action has ended."""
        if not self.counts or self.steps == MAX_TIMED_STEPS:
            return
        origin, *moments = self._moments
        if self._gpu:
            torch.cuda.synchronize()
            passed = [origin.elapsed_time(moment) / 1e3 for moment in moments]
        else:
            passed = [moment - origin for moment in moments]
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
