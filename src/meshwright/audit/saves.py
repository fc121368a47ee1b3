"""The cost of a run's checkpoints: time blocked, slower steps, waits; and the interval between them."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.core.events import Event
from meshwright.core.units import format_plural, format_seconds


@dataclass
class Saves:
    """Sums over the checkpoints of a run."""

    count: int = 0
    blocked_s: float = 0.0
    """Training waited, in all."""
    slowed_s: float = 0.0
    """Steps took longer while checkpoints were written, in all."""
    waited_s: float = 0.0
    """Part of ``blocked_s``: saves waited for the checkpoint before them."""
    waits: int = 0
    """Saves that waited."""
    interval_s: float | None = None
    """Interval of ``checkpoint.auto``; None without it, or before the first save was measured."""
    interval_reason: str | None = None

    def __post_init__(self) -> None:
        self._slowdowns: list[float] = []

    @property
    def slowdown(self) -> float | None:
        """Step time while a checkpoint is written over that outside, by the median checkpoint."""
        return statistics.median(self._slowdowns) if self._slowdowns else None

    def feed(self, event: Event) -> None:
        """Take in an event ``checkpoint``, ``checkpoint_waited`` or ``checkpoint_interval``."""
        if event["event"] == "checkpoint":
            self.count += 1
            self.blocked_s += blocked_s(event)
            self.slowed_s += event.get("slowed_s", 0.0)
            if event.get("slowdown") is not None:
                self._slowdowns.append(event["slowdown"])
        elif event["event"] == "checkpoint_waited":
            self.waits, self.waited_s = self.waits + 1, self.waited_s + event["waited_s"]
        elif event["event"] == "checkpoint_interval":
            self.interval_s, self.interval_reason = event["interval_s"], event["reason"]

    def sentence(self) -> str:
        """The sums in words."""
        parts = [f"{self.count} saved", f"training blocked for {format_seconds(self.blocked_s)}"]
        if self.slowdown is not None:
            times = f"steps {self.slowdown:.2f} times as long while one is written"
            parts.append(f"{times} ({format_seconds(self.slowed_s)} in all)")
        if self.waits:
            waits = format_plural(self.waits, "save")
            parts.append(f"{waits} waited {format_seconds(self.waited_s)} for the one before")
        return "; ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**asdict(self), "slowdown": self.slowdown}


def blocked_s(event: Event) -> float:
    """How long a checkpoint blocked training; older events have its whole time, in which training waited."""
    return float(event["blocked_s"] if "blocked_s" in event else event["seconds"])
