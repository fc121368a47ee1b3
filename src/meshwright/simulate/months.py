"""Months of a job: its failure model with all assumptions, the outcomes, and the best interval and spares."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_bytes, format_plural, format_seconds
from meshwright.layout.checkpoint_interval import NODE_HOURS, daly_interval_s, failure_rate, lost_share
from meshwright.plan.sizing import (
    ASSUMED_STORAGE_BYTES_PER_S,
    CHECKPOINT_BYTES,
    RESTART_S,
    checkpoint_write_s,
)
from meshwright.simulate.choices import (
    IntervalPoint,
    SparesPoint,
    best_interval,
    best_spares,
    try_intervals,
    try_spares,
)
from meshwright.simulate.failures import KINDS, FailureModel, Floats, Outcomes, draw_failures, simulate
from meshwright.simulate.settings import FailureSettings
from meshwright.spec.job import Job

CAUSES = {
    "device": {"GPU": 148, "HBM": 72, "SRAM": 19, "GPU processor": 17, "silent corruption": 6, "thermal": 6},
    "node": {"host maintenance": 32, "NIC": 7, "other": 16},
    "switch": {"switch or cable": 35},
    "software": {"software": 54, "watchdog": 7},
}
"""The 419 unexpected interruptions of Llama 3 (54 days, 16,384 GPUs), by kind and cause."""
DAY_S = 86_400.0
MOST_DAYS = 3650.0
MOST_RUNS = 1_000_000
MOST_FAILURES = 1_000_000.0
"""Expected failures of one run that the simulator takes."""


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
    first_order_goodput: float
    """By Young's first-order formula; it knows neither spares nor failures during restarts."""
    intervals: tuple[IntervalPoint, ...]
    """Tried under the same failures, ordered."""
    spares: tuple[SparesPoint, ...]
    """Tried under the same failures, ordered."""
    swept_runs: int
    """Runs of the trials."""
    assumptions: tuple[str, ...]
    reasons: tuple[str, ...]
    """Of the interval and the number of spares."""
    warnings: tuple[str, ...]

    @property
    def cost(self) -> float | None:
        """Price of all nodes, spares included, for the whole time, in USD."""
        if self.cost_per_hour is None:
            return None
        nodes = self.model.nodes + self.model.spares
        return self.cost_per_hour * nodes * self.devices_per_node * self.model.wall_s / 3600

    def lost_per_failure_s(self, goodput: float) -> float:
        """The time lost per failure that a goodput implies: inferred, not simulated.

        Raises:
            UserError: The goodput is not a share, or nothing fails.
        """
        if not 0 <= goodput <= 1 or not self.model.rate_per_s:
            rule = "must be between 0 and 1, and failures must happen"
            fix = "Use a share such as 0.59"
            raise UserError(
                Problem(
                    "simulate-goodput",
                    rule,
                    path="observed_goodput",
                    value=goodput,
                    fix=fix,
                    is_argument=True,
                )
            )
        return (1 - goodput) * self.model.between_s

    def as_dict(self) -> dict[str, Any]:
        """The object of ``meshwright simulate failures --json``."""
        model = dataclasses.asdict(self.model)
        return {
            "model": {**model, "mean_time_between_failures_s": _finite(self.model.between_s)},
            "runs": self.runs,
            "seed": self.seed,
            "goodput": dataclasses.asdict(self.goodput),
            "interruptions": dataclasses.asdict(self.interruptions),
            "lost_hours": {reason: dataclasses.asdict(found) for reason, found in self.lost_hours.items()},
            "cost": self.cost,
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
    check_settings(days, runs, seed, settings)
    model, assumptions = build_model(job, days, settings)
    if model.expected > MOST_FAILURES:
        rule = f"gives {model.expected:.2g} failures per run; at most {MOST_FAILURES:.0e} can be simulated"
        raise UserError(
            Problem("simulate-rate", rule, path="rate", fix="Lower --rate or --days", is_argument=True)
        )
    failures = next(draw_failures(model, runs, seed))  # the first chunk is enough for the trials
    interval_s = model.interval_s
    spares = try_spares(model, failures, interval_s)
    if settings.spares is None:
        model = dataclasses.replace(model, spares=best_spares(spares).spares)
    base_s = daly_s(model) if model.save_s and model.rate_per_s else interval_s
    intervals = try_intervals(model, failures, model.spares, base_s)
    outcomes = simulate(model, runs, seed)
    first_order = lost_share(
        interval_s, model.save_s, model.between_s, model.detect_s + model.restart_s + model.load_s
    )
    return FailureSimulation(
        model=model,
        runs=runs,
        seed=seed,
        goodput=_range(outcomes.goodput),
        interruptions=_range(outcomes.interruptions.astype(float)),
        lost_hours={reason: _range(lost_s / 3600) for reason, lost_s in outcomes.lost_s.items()},
        devices_per_node=job.cluster.devices_per_node,
        cost_per_hour=job.cluster.cost_per_hour,
        first_order_goodput=1 - first_order,
        intervals=intervals,
        spares=spares,
        swept_runs=failures.runs,
        assumptions=assumptions,
        reasons=explain_choices(model, settings, intervals, spares, len(failures.run) - failures.runs),
        warnings=find_warnings(model, outcomes),
    )


def _range(values: Floats) -> Range:
    low, high = np.quantile(values, (0.05, 0.95))
    return Range(float(values.mean()), float(low), float(high))


def daly_s(model: FailureModel) -> float:
    """Daly's interval, no longer than the run; the whole run without failures."""
    if not model.rate_per_s:
        return model.wall_s
    return min(daly_interval_s(model.save_s, model.between_s), model.wall_s)


def build_model(job: Job, days: float, settings: FailureSettings) -> tuple[FailureModel, tuple[str, ...]]:
    """The failure model of a job, with the values that were assumed for what is not set."""
    cluster = job.cluster
    write_s = checkpoint_write_s(job, cluster.nodes)
    rates_per_s, rate_basis = find_rates(job, settings.rates)
    watch_s = job.elastic.heartbeat_timeout_s or job.elastic.collective_timeout_s
    detect_s = watch_s if settings.detect_s is None else settings.detect_s
    load_s = write_s if settings.load_s is None else settings.load_s
    rest_s = max(0.0, RESTART_S - detect_s - load_s)
    restart_s = rest_s if settings.restart_s is None else settings.restart_s
    model = FailureModel(
        wall_s=days * DAY_S,
        nodes=cluster.nodes,
        rates_per_s=rates_per_s,
        detect_s=detect_s,
        restart_s=restart_s,
        load_s=load_s,
        save_s=write_s if settings.save_s is None else settings.save_s,
        interval_s=days * DAY_S,
        repair_s=settings.repair_hours * 3600,
        spares=settings.spares or 0,
    )
    given_s = None if settings.every_minutes is None else settings.every_minutes * 60
    model = dataclasses.replace(model, interval_s=daly_s(model) if given_s is None else given_s)
    assumed = [rate_basis]
    if settings.save_s is None or settings.load_s is None:
        assumed.append(_storage_basis(job, write_s))
    if settings.restart_s is None:
        assumed.append(f"{format_seconds(RESTART_S)} from a failure to the next step, as in plan --tokens")
    assumed.append(f"a failed node is repaired in {format_seconds(model.repair_s)}; software needs no repair")
    return model, tuple(assumed)


def _storage_basis(job: Job, write_s: float) -> str:
    rate = job.cluster.storage_bytes_per_s
    at = (
        f"{format_bytes(ASSUMED_STORAGE_BYTES_PER_S)}/s per node"
        if rate is None
        else f"{format_bytes(rate)}/s"
    )
    size = f"{CHECKPOINT_BYTES} bytes per parameter"
    return f"checkpoints of {size} at {at}: {format_seconds(write_s)}, synchronous"


def find_rates(job: Job, given: Mapping[str, float]) -> tuple[dict[str, float], str]:
    """Failures per second of the whole run by kind, and where they are from."""
    cluster = job.cluster
    found = failure_rate(cluster, cluster.world_size)
    counts = {kind: sum(CAUSES[kind].values()) for kind in KINDS}
    total = sum(counts.values())
    rates = {kind: counts[kind] / total / found.between_s for kind in KINDS}
    per_node_s = 1 / (NODE_HOURS * 3600)
    rates |= {kind: rate * cluster.nodes * per_node_s for kind, rate in given.items()}
    basis = f"failures: {found.basis.removeprefix('assumed: ')}; kinds as in Llama 3 ({total} failures)"
    if given:
        named = ", ".join(f"{kind} {rate:g}" for kind, rate in given.items())
        basis = f"failures per 1,000 node-days: {named}" + (
            "" if len(given) == len(KINDS) else f"; other {basis}"
        )
    return rates, basis


def check_settings(days: float, runs: int, seed: int, settings: FailureSettings) -> None:
    """Refuse what cannot be simulated, all mistakes at once.

    Raises:
        UserError: A length, rate or time is out of range.
    """
    minutes = settings.every_minutes
    free = settings.save_s == 0 and minutes is None
    length = f"must be more than 0 and at most {MOST_DAYS:g}"
    checks = [
        (0 < days <= MOST_DAYS, Problem("simulate-days", length, "days", days, is_argument=True)),
        (1 <= runs <= MOST_RUNS, _bad_setting("runs", runs, f"must be from 1 to {MOST_RUNS:,}")),
        (seed >= 0, _bad_setting("seed", seed, "must not be negative")),
        (
            minutes is None or 0 < minutes < math.inf,
            _bad_setting("every_minutes", minutes, "must be more than 0"),
        ),
        (not free, _bad_setting("save_s", 0, "needs every_minutes: the best interval would be 0")),
    ]
    for name in ("spares", "save_s", "detect_s", "restart_s", "load_s", "repair_hours"):
        value = getattr(settings, name)
        checks.append(
            (value is None or 0 <= value < math.inf, _bad_setting(name, value, "must be 0 or more"))
        )
    for kind, rate in settings.rates.items():
        checks.append((kind in KINDS, _bad_rate(kind, f"is not one of {', '.join(KINDS)}")))
        rule = f"of {kind} must be 0 or more, in failures per 1,000 node-days"
        checks.append((0 <= rate < math.inf, _bad_rate(rate, rule)))
    if wrong := [problem for holds, problem in checks if not holds]:
        raise UserError(*wrong)


def _bad_setting(name: str, value: float | None, rule: str) -> Problem:
    return Problem("simulate-setting", rule, path=name, value=value, is_argument=True)


def _bad_rate(value: str | float, rule: str) -> Problem:
    return Problem("simulate-rate", rule, path="rate", value=value, is_argument=True)


def find_warnings(model: FailureModel, outcomes: Outcomes) -> tuple[str, ...]:
    """What the user should look at."""
    found = []
    if model.interval_s > model.between_s:
        between = format_seconds(model.between_s)
        found.append(
            f"the checkpoint interval of {format_seconds(model.interval_s)} is longer than the mean time "
            f"between failures, {between}: most of the work is lost"
        )
    if not outcomes.goodput.any():
        found.append("no run makes progress: failures come faster than the run is restored or repaired")
    return tuple(found)


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
    every = (
        f"a checkpoint every {used} ({whose}): a save costs {format_seconds(model.save_s)}, and the mean "
        f"time between failures is {format_seconds(model.between_s)}; best of {len(intervals)} intervals "
        f"tried under {failures:,} failures: {format_seconds(best.interval_s)}, goodput {best.goodput:.2%}"
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
