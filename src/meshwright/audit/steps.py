"""The steps of a run over all its generations: each step counts as the last generation did it.

After a failure, and after a resume from an older checkpoint, some steps are replayed. Their losses must be
equal to those before.
"""

from __future__ import annotations

import bisect
import math
from array import array
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ReplayedLoss:
    """A replayed step with another loss."""

    step: int
    generation: int
    """The generation that repeated the step."""
    loss: float | None
    before: float | None
    before_generation: int


@dataclass
class StepSeries:
    """Loss, time and MFU by step."""

    numbers: array[int] = field(default_factory=lambda: array("l"))
    """Step numbers, ascending; the first step is 1."""
    losses: list[float | None] = field(default_factory=list)
    """NaN if not finite, None for a step without target tokens."""
    seconds: array[float] = field(default_factory=lambda: array("d"))
    mfus: array[float] = field(default_factory=lambda: array("d"))
    generations: array[int] = field(default_factory=lambda: array("l"))
    replayed: int = 0
    """Steps that were done and do not count: a later generation did them again, or the run ended before."""
    replayed_s: float = 0.0
    """Time of these."""
    differences: list[ReplayedLoss] = field(default_factory=list)

    def add(self, step: int, generation: int, loss: float | None, seconds: float, mfu: float) -> None:
        """Take in a step. A late line of a generation that was replaced does not count."""
        at = len(self.numbers)
        if self.numbers and step <= self.numbers[-1]:
            at = bisect.bisect_left(self.numbers, step)
            if self.numbers[at] == step:
                if generation > self.generations[at]:
                    self._replace(at, generation, loss, seconds, mfu)
                return
        self.numbers.insert(at, step)
        self.losses.insert(at, loss)
        self.seconds.insert(at, seconds)
        self.mfus.insert(at, mfu)
        self.generations.insert(at, generation)

    def _replace(self, at: int, generation: int, loss: float | None, seconds: float, mfu: float) -> None:
        before = self.losses[at]
        if not _is_equal(before, loss):
            self.differences.append(
                ReplayedLoss(self.numbers[at], generation, loss, before, self.generations[at])
            )
        self.replayed += 1
        self.replayed_s += self.seconds[at]
        self.losses[at], self.seconds[at], self.mfus[at] = loss, seconds, mfu
        self.generations[at] = generation

    def drop_after(self, step: int) -> None:
        """Drop the steps after the last one of the run: those of an attempt that was to go further."""
        rest = self.since(step)
        self.replayed += len(self.numbers[rest])
        self.replayed_s += sum(self.seconds[rest])
        for values in (self.numbers, self.losses, self.seconds, self.mfus, self.generations):
            del values[rest]

    def since(self, step: int) -> slice:
        """The steps after a step, as a slice of all lists."""
        return slice(bisect.bisect_right(self.numbers, step), None)


def _is_equal(before: float | None, loss: float | None) -> bool:
    if before is None or loss is None:
        return before is loss
    return before == loss or (math.isnan(before) and math.isnan(loss))
