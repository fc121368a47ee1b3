"""Builds one rank's actions where each rank has two stages, down the ranks and up again, and B is split."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.schedule.actions import Action, Kind

WHOLE = "G"
"""The letter of a step that is B with its own W directly behind it."""


class VeeRow:
    """A rank's actions, each kind in the order of the micro-batches; what has run out is passed over."""

    def __init__(self, rank: int, pp: int, micro_batches: int) -> None:
        self.actions: list[Action] = []
        self.waiting: list[Action] = []
        """Weight gradients that can run, first come first."""
        self._stages = (rank, 2 * pp - 1 - rank)
        self._micro_batches = micro_batches
        self._done = {"F0": 0, "F1": 0, "B0": 0, "B1": 0}

    def left(self, step: str) -> int:
        """Micro-batches for which a step, forward or backward, is still to be added."""
        return self._micro_batches - self._done[step]

    def add(self, steps: Iterable[str]) -> None:
        """Add steps: a letter and the lower (0) or upper (1) of the rank's stages, or W, the next that waits.

        The letters are those of the kinds, and G for the whole backward pass.
        """
        for step in steps:
            if step == Kind.WEIGHT:
                self.actions += self.waiting[:1]
                del self.waiting[:1]
            else:
                self._add_pass(step[0], int(step[1]))

    def _add_pass(self, letter: str, arm: int) -> None:
        kind = Kind.BACKWARD if letter == WHOLE else Kind(letter)
        step = f"{kind}{arm}"
        if not self.left(step):
            return
        stage, micro_batch = self._stages[arm], self._done[step]
        self._done[step] += 1
        self.actions.append(Action(kind, stage, micro_batch))
        if kind is Kind.BACKWARD:
            behind = self.actions if letter == WHOLE else self.waiting
            behind.append(Action(Kind.WEIGHT, stage, micro_batch))
