"""``meshwright simulate failures``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.api import FailureSettings, load_job
from meshwright.cli.output import Output
from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_cost, format_plural, format_seconds
from meshwright.report.failure_plot import draw_failures
from meshwright.report.figure import require_picture, save_figure

if TYPE_CHECKING:
    from meshwright.results import FailureSimulation, Range


@dataclass(frozen=True)
class SimulationRequest:
    """The job, its cluster, and the number and length of the simulated runs."""

    source: str
    overrides: Sequence[str]
    on: str | None
    days: float
    runs: int
    seed: int


def simulate_failures(
    output: Output,
    request: SimulationRequest,
    settings: FailureSettings,
    rates: Sequence[str],
    observed_goodput: float | None,
    out: Path | None,
) -> int:
    """Simulate, and print the outcomes, the choices and their reasons."""
    if out is not None:
        require_picture(out)
    if observed_goodput is not None:
        FailureSettings.check_goodput(observed_goodput)
    settings = dataclasses.replace(settings, rates=parse_rates(rates))
    job = load_job(request.source, *request.overrides, on=request.on)
    found = job.simulate_failures(request.days, runs=request.runs, seed=request.seed, settings=settings)
    content = found.as_dict()
    _show(output, found)
    if observed_goodput is not None:
        lost_s = found.lost_per_failure_s(observed_goodput)
        content["inferred_lost_per_failure_s"] = lost_s
        output.print(
            f"inferred, not simulated: a goodput of {observed_goodput:.1%} means {format_seconds(lost_s)} "
            f"lost per failure"
        )
    if out is not None:
        save_figure(draw_failures(found), out)
        output.print(f"\npicture: {out}")
    output.result({**content, "plot": None if out is None else str(out)})
    return 0


def parse_rates(texts: Sequence[str]) -> dict[str, float]:
    """Rates by kind from texts such as ``device=2.4``.

    Raises:
        UserError: A text is not a kind and a number.
    """
    found: dict[str, float] = {}
    for text in texts:
        kind, _, number = text.partition("=")
        try:
            found[kind.strip()] = float(number)
        except ValueError:
            fix = "Write a kind and failures per 1,000 node-days, such as device=2.4"
            rule = "is not a failure rate"
            raise UserError(Problem("simulate-rate", rule, path="--rate", value=text, fix=fix)) from None
    return found


def _show(output: Output, found: FailureSimulation) -> None:
    for warning in found.warnings:
        output.warn(warning)
    model, days = found.model, found.model.wall_s / 86_400
    rows = [
        ("goodput", *(f"{value:.2%}" for value in _values(found.goodput)), ""),
        ("interruptions", *(f"{value:.1f}" for value in _values(found.interruptions)), ""),
    ]
    used = {"snapshots": model.snapshot_s > 0, "fewer nodes": model.replans}
    rows += [
        (f"hours lost: {reason}", *(f"{value:.2f}" for value in _values(hours)), _share(hours, model.wall_s))
        for reason, hours in found.lost_hours.items()
        if used.get(reason, True)
    ]
    title = f"{format_plural(found.runs, 'run')} of {days:g} days, {format_plural(model.nodes, 'node')}"
    output.table(title, ("", "mean", "5%", "95%", "of the time"), rows)
    output.print()
    if found.first_order_goodput is not None:
        goodput = f"{found.first_order_goodput:.2%}"
        output.print(f"first-order formula (no waiting, no failures during restarts): goodput {goodput}")
    if found.cost is not None:
        lost = format_cost(found.cost * (1 - found.goodput.mean))
        output.print(f"cost: {_describe_cost(found)}; {lost} of it for lost time")
    if found.on_demand is not None:
        output.print(_compare(found, found.on_demand))
    for reason in found.reasons:
        output.print(reason)
    for assumption in found.assumptions:
        output.print(f"assumed: {assumption}")


def _describe_cost(found: FailureSimulation) -> str:
    spares = format_plural(found.model.spares, "spare node")
    if found.cost is None or found.cost_per_useful_hour is None:
        return f"unknown price with {spares}"
    hour = f"{found.cost_per_useful_hour:.2f} USD per useful device hour"
    return f"{format_cost(found.cost)} with {spares} ({hour})"


def _compare(found: FailureSimulation, other: FailureSimulation) -> str:
    """Preemptible machines against machines that are not."""
    text = f"without preemption: goodput {other.goodput.mean:.2%}, {_describe_cost(other)}"
    hours = found.cost_per_useful_hour, other.cost_per_useful_hour
    if hours[0] is None or hours[1] is None:
        return text
    better = (
        "preemptible machines are cheaper" if hours[0] < hours[1] else "preemption costs more than it saves"
    )
    return f"{text}: {better}"


def _values(found: Range) -> tuple[float, float, float]:
    return found.mean, found.low, found.high


def _share(hours: Range, wall_s: float) -> str:
    return f"{hours.mean * 3600 / wall_s:.2%}"
