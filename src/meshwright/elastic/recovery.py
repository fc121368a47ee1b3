"""One recovery from a failure, and the time of each of its parts.

Times are those of the supervisor's monotonic clock. The ranks report the parts of their setup with the event
``ready``. Of these the slowest to start counts, usually the new process: the others wait for it to join.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SETUP_PARTS = ("start", "join", "rebuild", "load")
"""Parts of a rank's setup, in order: start or reset the process, join the process groups, build model,
optimizer and data, load the state."""


@dataclass
class Recovery:
    """From the failure of a rank to the step at which the run was when it failed."""

    failed_at: float
    """When the supervisor knew of the failure."""
    detect_s: float | None
    """From the last sign of life of the failed rank to that time; None if it is not known."""
    failed_rank: int | None = None
    """None if devices came back, and no rank failed."""
    how: str = ""
    source: str = ""
    """Where the state came from: ``snapshot``, ``checkpoint`` or ``start``."""
    furthest_step: int = 0
    """Steps that the run had done."""
    _halted_at: float = 0.0
    _commands_sent_at: float = 0.0
    _ready_at: float | None = None
    _setup_s: dict[int, Mapping[str, float]] = field(default_factory=dict)
    _restored_step: int = 0

    def note_halted(self, failed_rank: int | None, how: str) -> None:
        """All ranks have left their collectives."""
        self._halted_at, self.failed_rank, self.how = time.monotonic(), failed_rank, how

    def note_ordered(self, source: str, furthest_step: int) -> None:
        """It is decided; all ranks are now told to join the next generation."""
        self._commands_sent_at, self.source, self.furthest_step = time.monotonic(), source, furthest_step

    def note_setup(self, rank: int, setup_s: Mapping[str, float]) -> None:
        """A rank is ready, and took this long for each part of its setup."""
        self._setup_s[rank] = setup_s

    def finish(self, restored_step: int) -> dict[str, Any]:
        """All ranks are ready; returns the fields of the event ``recovered``."""
        self._ready_at, self._restored_step = time.monotonic(), restored_step
        slowest = max(self._setup_s.values(), key=lambda parts: parts.get("start", 0.0), default={})
        return {
            "failed_rank": self.failed_rank,
            "how": self.how,
            "source": self.source,
            "restored_step": restored_step,
            "replayed_steps": max(0, self.furthest_step - restored_step),
            "detect_s": self.detect_s,
            "halt_s": self._halted_at - self.failed_at,
            "decide_s": self._commands_sent_at - self._halted_at,
            **{f"{part}_s": slowest.get(part, 0.0) for part in SETUP_PARTS},
            "seconds": self._ready_at - self.failed_at,
        }

    def note_step(self, step: int) -> dict[str, Any] | None:
        """A step was done; after the last one to repeat, returns the fields of the event ``replayed``."""
        if self._ready_at is None or step < self.furthest_step or self.furthest_step <= self._restored_step:
            return None
        seconds, self._ready_at = time.monotonic() - self._ready_at, None
        return {
            "restored_step": self._restored_step,
            "steps": self.furthest_step - self._restored_step,
            "seconds": seconds,
        }
