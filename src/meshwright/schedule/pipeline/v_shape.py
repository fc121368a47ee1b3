"""Builds the actions of one rank of a V-shaped schedule with a split backward pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from meshwright.schedule.pipeline.actions import Action, Kind

FULL_BACKWARD = "G"
"""Letter of a full backward pass: B directly followed by its W."""
_PASSES = {f"{kind}{arm}": (kind, arm) for kind in (Kind.FORWARD, Kind.BACKWARD) for arm in (0, 1)}
"""Steps of one pass of the lower (0) or upper (1) stage."""
_FULL_BACKWARDS = {f"{FULL_BACKWARD}{arm}": f"{Kind.BACKWARD}{arm}" for arm in (0, 1)}


class VShapedRow:
    """The actions of a rank, each kind in micro-batch order; a step without a micro-batch is skipped."""

    def __init__(self, rank: int, pp: int, micro_batches: int) -> None:
        self.actions: list[Action] = []
        self.deferred: deque[Action] = deque()
        """Deferred weight gradients, first in first out."""
        self._stages = (rank, 2 * pp - 1 - rank)
        self._micro_batches = micro_batches
        self._done = {"F0": 0, "F1": 0, "B0": 0, "B1": 0}

    def left(self, step: str) -> int:
        """Remaining micro-batches of a step."""
        return self._micro_batches - self._done[step]

    def add(self, steps: Iterable[str]) -> None:
        """Add steps: a letter and the lower (0) or upper (1) stage, or W for the next deferred one.

        Letters are those of the kinds, and G for a full backward pass.
        """
        for step in steps:
            if step in _PASSES:
                self._add_pass(step, self.deferred)
            elif step in _FULL_BACKWARDS:
                self._add_pass(_FULL_BACKWARDS[step], self.actions)
            elif self.deferred:
                self.actions.append(self.deferred.popleft())

    def _add_pass(self, step: str, behind: list[Action] | deque[Action]) -> None:
        """Add one pass; the weight gradient of a backward pass goes to ``behind``."""
        micro_batch = self._done[step]
        if micro_batch == self._micro_batches:
            return
        self._done[step] = micro_batch + 1
        kind, arm = _PASSES[step]
        stage = self._stages[arm]
        self.actions.append(Action(kind, stage, micro_batch))
        if kind is Kind.BACKWARD:
            behind.append(Action(Kind.WEIGHT, stage, micro_batch))
