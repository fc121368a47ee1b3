"""Goodput: the time of the steps that count, as a share of the whole time, and the causes of the rest.

The whole time is that of all commands, each from the first event of its ranks to the last. The time between
two commands, in which nothing ran, does not count. Times are those of rank 0's events.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from meshwright.audit.saves import blocked_s
from meshwright.core.events import Event

WORK = frozenset({"ready", "step", "eval", "checkpoint"})
"""Events of rank 0 after which the next work begins."""


@dataclass(frozen=True)
class Goodput:
    """Where the time of a run went, in seconds."""

    wall_s: float
    steps_s: float
    """Steps that count."""
    lost_s: dict[str, float]
    """By cause. They and the steps add up to the whole time."""

    @property
    def share(self) -> float:
        """Time of the steps that count, of the whole time."""
        return self.steps_s / self.wall_s

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"share": self.share, "wall_s": self.wall_s, "steps_s": self.steps_s, "lost_s": self.lost_s}


@dataclass
class GenerationTimes:
    """Unix times of one generation, as its events have them."""

    generation: int
    command: int
    """Number of the command that ran it, from 0."""
    began: float
    ended: float
    """Time of its last event."""
    ready: float | None = None
    """When rank 0 was ready to train; None if it never was."""
    worked: float | None = None
    """End of the last step, evaluation or checkpoint of rank 0."""
    first_step: int = 0
    last_step: int = 0

    def feed(self, event: Event, when: float) -> None:
        """Take in an event of this generation."""
        self.began, self.ended = min(self.began, when), max(self.ended, when)
        if event.get("rank") != 0:
            return
        name = event["event"]
        if name == "ready" and self.ready is None:
            self.ready, self.first_step = when, event["step"]
            self.last_step = self.first_step
        if name == "step":
            self.last_step = max(self.last_step, event["step"])
        if name in WORK:
            self.worked = when if self.worked is None else max(self.worked, when)


@dataclass
class RunClock:
    """The times of all generations, from their events."""

    generations: dict[int, GenerationTimes] = field(default_factory=dict)
    checkpoint_s: float = 0.0
    evaluation_s: float = 0.0

    def feed(self, event: Event, generation: int, command: int) -> None:
        """Take in an event."""
        when = event.get("time")
        if not isinstance(when, int | float):
            return
        if generation not in self.generations:
            self.generations[generation] = GenerationTimes(generation, command, when, when)
        self.generations[generation].feed(event, when)
        if event.get("rank") == 0 and event["event"] == "checkpoint":
            self.checkpoint_s += blocked_s(event)
        elif event.get("rank") == 0 and event["event"] == "eval":
            self.evaluation_s += event.get("seconds", 0.0)  # older runs did not measure it

    def measure(self, steps_s: float, replayed_s: float) -> Goodput | None:
        """Goodput of the run; None if no time has passed.

        Args:
            steps_s: Time of the steps that count.
            replayed_s: Time of steps that were replayed later.
        """
        found = [self.generations[number] for number in sorted(self.generations)]
        wall_s = start_up_s = recovery_s = 0.0
        for command in sorted({times.command for times in found}):
            parts = [times for times in found if times.command == command]
            wall_s += max(times.ended for times in parts) - parts[0].began
            start_up_s += (parts[0].ended if parts[0].ready is None else parts[0].ready) - parts[0].began
            for before, after in itertools.pairwise(parts):
                lost_from = before.ended if before.worked is None else before.worked
                recovery_s += (after.ended if after.ready is None else after.ready) - lost_from
        if wall_s <= 0:
            return None
        lost = {
            "start-up": start_up_s,
            "recovery": recovery_s,
            "replayed steps": replayed_s,
            "checkpoints": self.checkpoint_s,
            "evaluation": self.evaluation_s,
        }
        rest = wall_s - steps_s - sum(lost.values())
        return Goodput(wall_s, steps_s, {**lost, "other": rest})
