"""What simulated runs achieve with a checkpoint interval: goodput, and lost time by reason.

A save stops training, and its checkpoint counts from the end of the save. After a restart the time until the
next save is counted anew. A snapshot protects work from failures of devices and software only: work that
was restored from a snapshot is lost when a node fails before the next save.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.simulate.downtime import CHECKPOINT, SNAPSHOT, Downtime, Events, find_downtime
from meshwright.simulate.failures import FailureModel, Floats, Ints, draw_failures

LOSSES = (
    "checkpoints",
    "snapshots",
    "lost work",
    "detection and restart",
    "waiting for nodes",
    "fewer nodes",
)
"""Reasons of lost time."""


@dataclass(frozen=True)
class Outcomes:
    """Each run: useful share of the time, interruptions, and seconds lost by reason."""

    goodput: Floats
    """Work that was kept, over the work of the complete run without interruptions."""
    interruptions: Ints
    lost_s: dict[str, Floats]
    """By ``LOSSES``."""


def evaluate(downtime: Downtime, model: FailureModel, interval_s: float) -> Outcomes:
    """Outcomes of the runs with a checkpoint interval."""
    trained = downtime.train_s
    saves = np.floor(trained / (interval_s + model.save_s))
    rest = trained - saves * (interval_s + model.save_s)
    unsaved = np.minimum(rest, interval_s)
    saving = saves * model.save_s + (rest - unsaved)
    work, copying, protected = _snapshots(model, saves, unsaved, interval_s)
    done = saves * work(interval_s) + work(unsaved)
    at_risk = np.where(downtime.ends == SNAPSHOT, work(unsaved) - protected, 0.0)
    at_risk = np.where(downtime.ends == CHECKPOINT, work(unsaved), at_risk)
    lost = at_risk
    lost_full = at_risk * downtime.speed
    if model.snapshot_s:
        kept = np.where(downtime.ends == SNAPSHOT, protected, 0.0)
        fails = downtime.ends == CHECKPOINT
        lost = lost + np.where(fails, _carried(downtime, saves, kept), 0.0)
        lost_full = lost_full + np.where(fails, _carried(downtime, saves, kept * downtime.speed), 0.0)
    useful = done * downtime.speed - lost_full
    slower = done * (1 - downtime.speed) - (lost - lost_full)
    sums = [np.add.reduceat(x, downtime.starts) for x in (useful, saving, copying, lost, slower)]
    useful_s, saving_s, copying_s, lost_s, slower_s = sums
    losses = (saving_s, copying_s, lost_s, downtime.restore_s, downtime.wait_s, slower_s)
    return Outcomes(useful_s / model.wall_s, downtime.failures, dict(zip(LOSSES, losses, strict=True)))


class _Work:
    """Work in some seconds of training after a save: all but the copies of snapshots."""

    def __init__(self, model: FailureModel) -> None:
        self.every_s, self.cost_s = model.snapshot_s, model.snapshot_cost_s

    def __call__(self, trained: Floats | float) -> Floats:
        """Seconds of work."""
        return np.asarray(trained - self.copying(trained))

    def copying(self, trained: Floats | float) -> Floats:
        """Seconds of snapshots, complete or not."""
        if not self.every_s:
            return np.zeros_like(trained)
        count = np.floor(trained / (self.every_s + self.cost_s))
        rest = trained - count * (self.every_s + self.cost_s)
        return np.asarray(count * self.cost_s + np.maximum(rest - self.every_s, 0.0))

    def protected(self, trained: Floats) -> Floats:
        """Seconds of work in complete snapshots."""
        if not self.every_s:
            return np.zeros_like(trained)
        return np.floor(trained / (self.every_s + self.cost_s)) * self.every_s


def _snapshots(
    model: FailureModel, saves: Floats, unsaved: Floats, interval_s: float
) -> tuple[_Work, Floats, Floats]:
    """The work between saves, the time of all snapshots, and the work after the last save that they hold."""
    work = _Work(model)
    copying = saves * work.copying(interval_s) + work.copying(unsaved)
    return work, copying, work.protected(unsaved)


def _carried(downtime: Downtime, saves: Floats, kept: Floats) -> Floats:
    """Work of earlier segments that no save holds yet, at the end of each segment.

    Work is carried over restarts from snapshots, until a segment has a save.
    """
    until = np.cumsum(kept) - kept  # of all earlier segments
    anew = (downtime.begins != SNAPSHOT) | (saves > 0)
    since = np.maximum.accumulate(np.where(anew, until, 0.0))
    return until - since


def simulate(model: FailureModel, runs: int, seed: int) -> Outcomes:
    """Simulate many runs of a model."""
    found = [
        evaluate(find_downtime(Events.of(failures, model), model, model.spares), model, model.interval_s)
        for failures in draw_failures(model, runs, seed)
    ]
    return Outcomes(
        np.concatenate([one.goodput for one in found]),
        np.concatenate([one.interruptions for one in found]),
        {reason: np.concatenate([one.lost_s[reason] for one in found]) for reason in LOSSES},
    )
