"""What a fault test without a schedule gets, and how it reports a violated invariant or an obstacle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from meshwright.runs.faults.criteria import Figure


class ViolationError(Exception):
    """An invariant is violated."""


class CannotRunError(Exception):
    """This machine lacks what the test needs."""


@dataclass
class CheckRun:
    """One run of a test."""

    folder: Path
    """Empty, and removed afterwards."""
    random: Random
    progress: Callable[[str], None] = lambda text: None
    """Shows a line to the user."""
    figures: list[Figure] = field(default_factory=list)

    def count(self, name: str, value: float, at_least: float | None = None, unit: str = "") -> None:
        """Report a number; with a limit, the least that it must be."""
        self.figures.append(Figure(name, value, at_least, unit, at_least=True))

    def limit(self, name: str, value: float, at_most: float, unit: str = "s") -> None:
        """Report a number and the most that it may be."""
        self.figures.append(Figure(name, value, at_most, unit))


def require(holds: object, text: str) -> None:
    """Go on if an invariant holds.

    Raises:
        ViolationError: With the text.
    """
    if not holds:
        raise ViolationError(text)
