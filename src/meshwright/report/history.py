"""Curves and attempts of a run folder, over all restarts."""

from __future__ import annotations

import itertools
import math
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.audit.backup_slices import SliceLog
from meshwright.audit.event_scan import Attempt, Scan, scan_events
from meshwright.audit.record import RunRecord, feed_checked, reading_events
from meshwright.core.events import EVENTS_FILE, Event
from meshwright.report.plot import Series

NOT_CURVES = frozenset({"v", "event", "time", "rank", "generation", "step", "tokens", "step_s", "slice"})
"""Fields of a step event that are not drawn as curves."""
MISSING = float("nan")


@dataclass
class Curves:
    """The values of one attempt by field, one per step; NaN if a step has none."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: dict[str, array[float]] = field(default_factory=dict)
    evaluations: dict[str | None, list[tuple[float, float]]] = field(default_factory=dict)
    """Steps and losses by held-out set; None is the held-out split of the data."""
    without_targets: set[float] = field(default_factory=set)
    """Steps without target tokens, and so without a loss."""

    def feed(self, event: Event) -> None:
        """Take in a step or an evaluation."""
        step = event.get("step")
        if not isinstance(step, int):
            return
        if event["event"] == "eval":
            evaluations = self.evaluations.setdefault(event.get("set"), [])
            evaluations.append((float(step), as_number(event.get("loss"))))
            return
        before = len(self.steps)
        self.steps.append(float(step))
        if event.get("tokens") == 0:
            self.without_targets.add(float(step))
        for name, value in event.items():
            if name not in NOT_CURVES and (value is None or isinstance(value, int | float)):
                if name not in self.values:
                    self.values[name] = array("d", [MISSING] * before)
                self.values[name].append(as_number(value))
        for series in self.values.values():
            if len(series) == before:
                series.append(MISSING)


@dataclass
class History:
    """All attempts at a run, oldest first."""

    run: RunRecord = field(default_factory=RunRecord)
    """All attempts together."""
    attempts: list[Attempt] = field(default_factory=list)
    curves: list[Curves] = field(default_factory=list)
    """One per generation."""
    unreadable: int = 0
    slices: SliceLog = field(default_factory=SliceLog)
    """Slices whose gradients were used, by rank, in a run with backup replicas."""

    @property
    def newest(self) -> Attempt:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else Attempt(0)

    def fields(self) -> list[str]:
        """Fields with at least one finite value, in the order of the events."""
        names = dict.fromkeys(name for curves in self.curves for name in curves.values)
        return [
            n for n in names if any(map(math.isfinite, (v for c in self.curves for v in c.values.get(n, ()))))
        ]

    def series(self, name: str, label: str, style: int = 0) -> Series:
        """The curve of a field, one segment per attempt."""
        segments = [tuple(zip(c.steps, c.values[name], strict=True)) for c in self.curves if name in c.values]
        return Series(label, tuple(segments), style)

    def evaluations(self, name: str | None, label: str, style: int = 1) -> Series:
        """The loss on a held-out set, one segment per attempt."""
        found = [tuple(c.evaluations[name]) for c in self.curves if name in c.evaluations]
        return Series(label, tuple(found), style)

    def restarts(self) -> tuple[tuple[float, str], ...]:
        """Steps that later attempts, and recoveries from failures, went on from, with labels."""
        places = []
        for number, attempt in enumerate(self.attempts[1:], start=1):
            at = attempt.resumed_at or 0
            places.append((float(at), f"restart {number} at step {at}"))
        for recovery in self.run.recoveries:
            step, failed = recovery.restored_step, f"rank {recovery.failed_rank} failed"
            cause = "more devices" if recovery.failed_rank is None else failed
            places.append((float(step), f"{cause}; resumed from step {step}"))
        return tuple(places)

    def not_finite(self) -> tuple[tuple[float, str], ...]:
        """First step of each attempt whose loss was not finite, with labels."""
        places = []
        for curves in self.curves:
            found = (
                s
                for s, y in zip(curves.steps, curves.values.get("loss", ()), strict=False)
                if not math.isfinite(y) and s not in curves.without_targets
            )
            places += [(step, f"loss not finite at step {step:.0f}") for step in itertools.islice(found, 1)]
        return tuple(places)

    def steps(self) -> tuple[float, float] | None:
        """The first and the last step of all attempts."""
        found = [step for curves in self.curves for step in curves.steps]
        found += [step for c in self.curves for points in c.evaluations.values() for step, _ in points]
        return (min(found), max(found)) if found else None


def as_number(value: object) -> float:
    """A value of an event; null is NaN."""
    return float(value) if isinstance(value, int | float) else MISSING


def read_history(run_dir: Path) -> History:
    """Read a run's events once."""
    path = run_dir / EVENTS_FILE
    history = History()
    scan = Scan(slices=history.slices)
    with reading_events(run_dir):
        for event in scan_events(path, scan):
            _take(history, event)
    history.unreadable = scan.unreadable
    return history


def _take(history: History, event: Event) -> None:
    before = history.run.newest
    feed_checked(history.run, event)
    newest = history.run.newest
    if newest.attempt > before.attempt:
        history.attempts.append(Attempt(newest.generation))
    if newest is not before:
        history.curves.append(Curves())
    if event.get("generation", 0) != newest.generation:
        return  # a late line, or an edited file
    history.newest.feed(event)
    if event.get("rank") == 0 and event["event"] in ("step", "eval"):
        history.curves[-1].feed(event)
