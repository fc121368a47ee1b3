"""Refuses settings of a simulation that are impossible, and warns of implausible ones."""

from __future__ import annotations

import math

from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_plural, format_seconds
from meshwright.simulate.failures import KINDS, FailureModel
from meshwright.simulate.job_model import checkpoint_mtbf_s
from meshwright.simulate.node_throughput import does_replan, least_nodes
from meshwright.simulate.outcomes import Outcomes
from meshwright.simulate.settings import FailureSettings
from meshwright.spec.job import Job

MOST_DAYS = 3650.0
MOST_RUNS = 1_000_000
MOST_FAILURES = 1_000_000.0
"""Expected failures of one run that the simulator takes."""
REPAIRS = ("fixed", "exponential")


def check_settings(job: Job, days: float, runs: int, seed: int, settings: FailureSettings) -> None:
    """Refuse what cannot be simulated, all mistakes at once.

    Raises:
        UserError: A length, rate or time is out of range.
    """
    length = f"must be more than 0 and at most {MOST_DAYS:g}"
    checks = [
        (0 < days <= MOST_DAYS, Problem("simulate-days", length, "days", days, is_argument=True)),
        (1 <= runs <= MOST_RUNS, _bad_setting("runs", runs, f"must be from 1 to {MOST_RUNS:,}")),
        (seed >= 0, _bad_setting("seed", seed, "must not be negative")),
        *_check_ranges(job, settings),
        *_check_combinations(job, settings),
    ]
    for kind, rate in settings.rates.items():
        checks.append((kind in KINDS, _bad_rate(kind, f"is not one of {', '.join(KINDS)}")))
        rule = f"of {kind} must be 0 or more, in failures per 1,000 node-days"
        checks.append((0 <= rate < math.inf, _bad_rate(rate, rule)))
    if wrong := [problem for holds, problem in checks if not holds]:
        raise UserError(*wrong)


def _check_ranges(job: Job, settings: FailureSettings) -> list[tuple[bool, Problem]]:
    checks: list[tuple[bool, Problem]] = []
    for name in ("spares", "save_s", "detect_s", "restart_s", "load_s", "repair_hours", "snapshot_cost_s",
                 "notice_s", "replace_hours"):  # fmt: skip
        value = getattr(settings, name)
        checks.append(
            (value is None or 0 <= value < math.inf, _bad_setting(name, value, "must be 0 or more"))
        )
    for name in ("every_minutes", "snapshot_minutes", "price_factor"):
        value = getattr(settings, name)
        checks.append(
            (value is None or 0 < value < math.inf, _bad_setting(name, value, "must be more than 0"))
        )
    nodes = job.cluster.nodes
    rule = f"must be from 1 to the {format_plural(nodes, 'node')} of the cluster"
    for name in ("min_nodes", "nodes_per_replica", "nodes_per_switch"):
        value = getattr(settings, name)
        checks.append((value is None or 1 <= value <= nodes, _bad_setting(name, value, rule)))
    known = f"is not one of {', '.join(REPAIRS)}"
    checks.append((settings.repair in REPAIRS, _bad_setting("repair", settings.repair, known)))
    return checks


def _check_combinations(job: Job, settings: FailureSettings) -> list[tuple[bool, Problem]]:
    free = settings.save_s == 0 and settings.every_minutes is None
    checks = [(not free, _bad_setting("save_s", 0, "needs --every-minutes: the best interval would be 0"))]
    for name in ("min_nodes", "nodes_per_replica"):
        value = getattr(settings, name)
        alone = value is not None and not does_replan(job, settings.replan)
        checks.append((not alone, _bad_setting(name, value, "has no effect without --replan (replan=True)")))
    alone = settings.snapshot_cost_s is not None and settings.snapshot_minutes is None
    rule = "has no effect without --snapshot-minutes"
    checks.append((not alone, _bad_setting("snapshot_cost_s", settings.snapshot_cost_s, rule)))
    cheaper = settings.price_factor != 1 and not settings.rates.get("preemption")
    rule = "needs a rate of preemptions, such as --rate preemption=20"
    checks.append((not cheaper, _bad_setting("price_factor", settings.price_factor, rule)))
    return checks


def check_number(model: FailureModel) -> None:
    """Refuse more failures than can be simulated.

    Raises:
        UserError: There are too many.
    """
    if model.expected > MOST_FAILURES:
        rule = f"gives {model.expected:.2g} failures per run; at most {MOST_FAILURES:.0e} can be simulated"
        raise UserError(
            Problem("simulate-rate", rule, path="rate", fix="Lower --rate or --days", is_argument=True)
        )


def _bad_setting(name: str, value: float | str | None, rule: str) -> Problem:
    return Problem("simulate-setting", rule, path=name, value=value, is_argument=True)


def _bad_rate(value: str | float, rule: str) -> Problem:
    return Problem("simulate-rate", rule, path="rate", value=value, is_argument=True)


def find_warnings(job: Job, model: FailureModel, outcomes: Outcomes) -> tuple[str, ...]:
    """Warnings about the settings and outcomes; each ends in a code."""
    found = []
    mtbf_s = checkpoint_mtbf_s(model)
    if model.interval_s > mtbf_s:
        found.append(
            f"the checkpoint interval of {format_seconds(model.interval_s)} is longer than the mean time "
            f"between failures, {format_seconds(mtbf_s)}: most of the work is lost "
            "[simulate-long-interval]"
        )
    if model.snapshot_s >= model.interval_s:
        found.append(
            f"a snapshot every {format_seconds(model.snapshot_s)} is rarer than checkpoints: it gains "
            "nothing [simulate-rare-snapshots]"
        )
    if (needed := least_nodes(job)) > model.nodes:
        found.append(
            f"no layout without offloading fits on {format_plural(model.nodes, 'node')}: the optimizer state "
            f"alone needs {needed} [simulate-too-few-nodes]"
        )
    if not outcomes.goodput.any():
        found.append(
            "no run makes progress: failures come faster than the run is restored or repaired "
            "[simulate-no-progress]"
        )
    return tuple(found)
