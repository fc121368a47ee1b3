"""Months of a job: the outcomes of its failure model, and the best interval and number of spare nodes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_plural, format_seconds
from meshwright.layout.checkpoint_interval import lost_share
from meshwright.simulate.checks import check_number, check_settings, find_warnings
from meshwright.simulate.choices import (
    IntervalPoint,
    SparesPoint,
    best_interval,
    best_spares,
    try_intervals,
    try_spares,
)
from meshwright.simulate.downtime import Events
from meshwright.simulate.failures import FailureModel, Floats, draw_failures
from meshwright.simulate.job_model import build_model, checkpoint_mtbf_s, daly_s
from meshwright.simulate.node_throughput import NodePlanner
from meshwright.simulate.outcomes import simulate
from meshwright.simulate.settings import FailureSettings
from meshwright.spec.job import Job

SWEEP_FAILURES = 250_000
"""Failures of the trials of intervals and spares."""


@dataclass(frozen=True)
class Range:
    """A figure over the runs."""

    mean: float
    low: float
    """5% of the runs are below."""
    high: float
    """5% of the runs are above."""


@dataclass(frozen=True)
class FailureSimulation:
    """Simulated months of a job. Made by :meth:`meshwright.Job.simulate_failures`."""

    model: FailureModel
    runs: int
    seed: int
    goodput: Range
    """Share of the time that is useful training."""
    interruptions: Range
    lost_hours: Mapping[str, Range]
    """By reason."""
    devices_per_node: int
    cost_per_hour: float | None
    """Per device, in USD."""
    price_factor: float
    """Price of preemptible machines over that of others; 1 without preemptions."""
    first_order_goodput: float | None
    """By Young's first-order formula; it knows neither spares nor failures during restarts. None with
    snapshots, re-planning or preemptions, for which it does not hold."""
    intervals: tuple[IntervalPoint, ...]
    """Tried under the same failures, ordered."""
    spares: tuple[SparesPoint, ...]
    """Tried under the same failures, ordered."""
    swept_runs: int
    """Runs of the trials."""
    assumptions: tuple[str, ...]
    reasons: tuple[str, ...]
    """Reasons for the interval and the number of spares."""
    warnings: tuple[str, ...]
    on_demand: FailureSimulation | None = None
    """The same without preemptions at the full price; None if nothing is preempted."""

    def __repr__(self) -> str:
        return f"FailureSimulation(goodput={self.goodput.mean:.3f}, runs={self.runs}, seed={self.seed})"

    @property
    def cost(self) -> float | None:
        """Price of all nodes, spares included, for the whole time, in USD."""
        if self.cost_per_hour is None:
            return None
        nodes = self.model.nodes + self.model.spares
        hours = nodes * self.devices_per_node * self.model.wall_s / 3600
        return self.cost_per_hour * self.price_factor * hours

    @property
    def cost_per_useful_hour(self) -> float | None:
        """Price of an hour of one device that trains without interruptions, in USD."""
        if self.cost is None or not self.goodput.mean:
            return None
        hours = self.model.nodes * self.devices_per_node * self.model.wall_s / 3600
        return self.cost / (hours * self.goodput.mean)

    def lost_per_failure_s(self, goodput: float) -> float:
        """The time lost per failure that a goodput implies: inferred, not simulated.

        Raises:
            UserError: The goodput is not a share, or nothing fails.
        """
        FailureSettings.check_goodput(goodput)
        if not self.model.rate_per_s:
            rule, fix = "needs failures, and this cluster has none", "Give --rate"
            raise UserError(
                Problem("simulate-goodput", rule, "observed_goodput", goodput, fix, is_argument=True)
            )
        return (1 - goodput) * self.model.mtbf_s

    def as_dict(self) -> dict[str, Any]:
        """The object of ``meshwright simulate failures --json``."""
        model = dataclasses.asdict(self.model)
        return {
            "model": {**model, "mean_time_between_failures_s": _finite(self.model.mtbf_s)},
            "runs": self.runs,
            "seed": self.seed,
            "goodput": dataclasses.asdict(self.goodput),
            "interruptions": dataclasses.asdict(self.interruptions),
            "lost_hours": {reason: dataclasses.asdict(found) for reason, found in self.lost_hours.items()},
            "cost": self.cost,
            "price_factor": self.price_factor,
            "cost_per_useful_hour": self.cost_per_useful_hour,
            "on_demand": None if self.on_demand is None else self.on_demand.as_dict(),
            "first_order_goodput": self.first_order_goodput,
            "best_interval_s": best_interval(self.intervals).interval_s,
            "best_spares": best_spares(self.spares).spares,
            "intervals": [dataclasses.asdict(point) for point in self.intervals],
            "spares": [dataclasses.asdict(point) for point in self.spares],
            "swept_runs": self.swept_runs,
            "assumptions": list(self.assumptions),
            "reasons": list(self.reasons),
            "warnings": list(self.warnings),
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def simulate_job(job: Job, days: float, runs: int, seed: int, settings: FailureSettings) -> FailureSimulation:
    """Simulate months of a job on its whole cluster.

    Raises:
        UserError: A length, rate or time is out of range.
    """
    check_settings(job, days, runs, seed, settings)
    planner = NodePlanner(job)
    found = _simulate(planner, days, runs, seed, settings)
    if not settings.rates.get("preemption"):
        return found
    kept = {kind: rate for kind, rate in settings.rates.items() if kind != "preemption"}
    alternative = dataclasses.replace(settings, rates=kept, price_factor=1.0)
    return dataclasses.replace(found, on_demand=_simulate(planner, days, runs, seed, alternative))


def _simulate(
    planner: NodePlanner, days: float, runs: int, seed: int, settings: FailureSettings
) -> FailureSimulation:
    job = planner.job
    model, assumptions = build_model(job, days, settings, planner)
    check_number(model)
    sample = next(draw_failures(model, runs, seed, SWEEP_FAILURES))
    events = Events.of(sample, model)
    spares = try_spares(model, events, model.interval_s)
    if settings.spares is None:
        model = dataclasses.replace(model, spares=best_spares(spares).spares)
    base_s = daly_s(model) if model.save_s and model.rate_per_s else model.interval_s
    intervals = try_intervals(model, events, model.spares, base_s)
    outcomes = simulate(model, runs, seed)
    return FailureSimulation(
        model=model,
        runs=runs,
        seed=seed,
        goodput=find_range(outcomes.goodput),
        interruptions=find_range(outcomes.interruptions.astype(float)),
        lost_hours={reason: find_range(lost_s / 3600) for reason, lost_s in outcomes.lost_s.items()},
        devices_per_node=job.cluster.devices_per_node,
        cost_per_hour=job.cluster.cost_per_hour,
        price_factor=settings.price_factor,
        first_order_goodput=_first_order(model),
        intervals=intervals,
        spares=spares,
        swept_runs=sample.runs,
        assumptions=assumptions,
        reasons=explain_choices(model, settings, intervals, spares, sample.failures),
        warnings=find_warnings(job, model, outcomes),
    )


def find_range(values: Floats) -> Range:
    """Mean and spread over the runs."""
    low, high = np.quantile(values, (0.05, 0.95))
    return Range(float(values.mean()), float(low), float(high))


def _first_order(model: FailureModel) -> float | None:
    """Young's formula, where its assumptions are those of the model."""
    if model.replans or model.snapshot_s or model.rates_per_s.get("preemption"):
        return None
    restore_s = model.detect_s + model.restart_s + model.load_s
    return 1 - lost_share(model.interval_s, model.save_s, model.mtbf_s, restore_s)


def explain_choices(
    model: FailureModel,
    settings: FailureSettings,
    intervals: tuple[IntervalPoint, ...],
    spares: tuple[SparesPoint, ...],
    failures: int,
) -> tuple[str, ...]:
    """The interval and the spares that were simulated, the best of the trials, and why."""
    if not model.rate_per_s:
        return ("nothing fails: neither checkpoints nor spares gain anything",)
    best, used = best_interval(intervals), format_seconds(model.interval_s)
    whose = "Daly's interval" if settings.every_minutes is None else "as given"
    mtbf_s = checkpoint_mtbf_s(model)
    which = "failures" if mtbf_s == model.mtbf_s else "failures that go back to a checkpoint"
    mean = "there are no failures that go back to a checkpoint"
    if math.isfinite(mtbf_s):
        mean = f"the mean time between {which} is {format_seconds(mtbf_s)}"
    every = (
        f"a checkpoint every {used} ({whose}): a save costs {format_seconds(model.save_s)}, and {mean}; "
        f"best of {len(intervals)} intervals tried under {failures:,} failures: "
        f"{format_seconds(best.interval_s)}, goodput {best.goodput:.2%}"
    )
    chosen = best_spares(spares)
    whose = "as given" if settings.spares is not None else "the most useful work per paid device hour"
    neighbours = [p for p in spares if p.spares in (0, chosen.spares - 1, chosen.spares + 1)]
    tried = "; ".join(
        f"{p.spares}: goodput {p.goodput:.2%}, {p.per_device:.2%} per paid device"
        for p in sorted({*neighbours, chosen}, key=lambda p: p.spares)
    )
    nodes = format_plural(model.spares, "spare node")
    return every, f"{nodes} ({whose}); best of {len(spares)} numbers tried: {chosen.spares} ({tried})"
