"""The best checkpoint interval and the best number of spare nodes, by simulation under the same failures."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.simulate.downtime import Events, find_downtime
from meshwright.simulate.failures import FailureModel
from meshwright.simulate.outcomes import evaluate

INTERVAL_STEPS = range(-16, 17)
"""Tried: the base interval x 2^(step / 8), a quarter to four times."""
MOST_SPARES_TRIED = 24
"""Numbers of spares per pass; a second pass refines the first where it skipped numbers."""

MOST_SPARES = 100_000
"""Most that are tried."""


@dataclass(frozen=True)
class IntervalPoint:
    """A checkpoint interval that was tried."""

    interval_s: float
    goodput: float
    """Mean over the runs."""


@dataclass(frozen=True)
class SparesPoint:
    """A number of spare nodes that was tried."""

    spares: int
    goodput: float
    """Mean over the runs."""
    per_device: float
    """Goodput x nodes / (nodes + spares): useful work per paid device hour."""


def try_intervals(
    model: FailureModel, events: Events, spares: int, base_s: float
) -> tuple[IntervalPoint, ...]:
    """Intervals around a base, no longer than the run."""
    downtime = find_downtime(events, model, spares)
    intervals = dict.fromkeys(min(base_s * 2 ** (step / 8), model.wall_s) for step in INTERVAL_STEPS)
    return tuple(
        IntervalPoint(interval_s, float(evaluate(downtime, model, interval_s).goodput.mean()))
        for interval_s in intervals
    )


def try_spares(model: FailureModel, events: Events, interval_s: float) -> tuple[SparesPoint, ...]:
    """Numbers of spare nodes from 0 to more than are ever missing at once, ordered."""
    tried: dict[int, SparesPoint] = {}

    def attempt(spares: int) -> None:
        if spares not in tried:
            outcomes = evaluate(find_downtime(events, model, spares), model, interval_s)
            goodput = float(outcomes.goodput.mean())
            tried[spares] = SparesPoint(spares, goodput, goodput * model.nodes / (model.nodes + spares))

    most = min(model.most_missing, MOST_SPARES)
    step = math.ceil((most + 1) / MOST_SPARES_TRIED)
    for spares in range(0, most + 1, step):
        attempt(spares)
    best = best_spares(tuple(tried.values())).spares
    for spares in range(max(0, best - step + 1), best + step, math.ceil(2 * step / MOST_SPARES_TRIED)):
        attempt(spares)
    return tuple(point for _, point in sorted(tried.items()))


def best_interval(points: tuple[IntervalPoint, ...]) -> IntervalPoint:
    """The highest goodput; ties: the longest interval."""
    return max(points, key=lambda point: (point.goodput, point.interval_s))


def best_spares(points: tuple[SparesPoint, ...]) -> SparesPoint:
    """The most useful work per paid device hour; ties: the fewest."""
    return max(points, key=lambda point: (point.per_device, -point.spares))
