"""``meshwright plan``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from meshwright.api import Job, Plan, load_job
from meshwright.cli.output import Output
from meshwright.cli.plan_text import describe_plan, describe_ranking
from meshwright.cli.plan_why import describe_explanation
from meshwright.cli.reporter import ConsoleReporter
from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_cost, format_days, format_seconds
from meshwright.layout.text import describe_layout
from meshwright.report.figure import require_picture

if TYPE_CHECKING:
    from meshwright.results import ClusterSize, Objective, SizedCluster, UnusedSetting

_UNITS = {"h": 3600.0, "d": 86_400.0, "w": 604_800.0}


@dataclass(frozen=True)
class PlanRequest:
    """The arguments of the command."""

    source: str
    overrides: tuple[str, ...] = ()
    on: str | None = None
    top: int = 50
    by: Objective = "time"
    why: tuple[str, ...] = ()
    tokens: float | None = None
    deadline: str | None = None
    max_cost: float | None = None
    picture: Path | None = None
    out: Path | None = None
    verbose: bool = False


class SizingLimits(NamedTuple):
    """The requirements for a cluster: arguments of :meth:`Job.size_cluster`."""

    tokens: float
    deadline_s: float | None
    max_cost: float | None


def show_plan(output: Output, request: PlanRequest) -> int:
    """Rank the layouts and print the best one, or explain one, or size the cluster."""
    if request.picture is not None:
        require_picture(request.picture)
    goal = _sizing_goal(request)
    reporter = ConsoleReporter(output)
    if request.why:
        _refuse_with_why(request)
        job = _load_without_layout(request)
        explanation = job.explain(*request.why, *_layout_overrides(request), reporter=reporter)
        describe_explanation(output, explanation, request.verbose)
        _warn_of_unused_settings(output, explanation.unused_settings)
        output.result(explanation.as_dict())
        return 0
    job = load_job(request.source, *request.overrides, on=request.on)
    sizing = None
    if goal is not None:
        sized = job.size_cluster(*goal, reporter=reporter)
        job, sizing = Job(sized.job), sized.sizing
        _describe_sizing(output, sized)
    plan = job.plan(by=request.by, top=request.top, reporter=reporter)
    written = _write_files(plan, request)
    describe_plan(output, plan.contract, request.verbose)
    if request.verbose:
        describe_ranking(output, plan.search, request.top)
    for sentence in written:
        output.print(sentence)
    _warn_of_unused_settings(output, plan.unused_settings)
    output.result(plan.as_dict(request.top) | ({} if sizing is None else {"sizing": sizing.summary()}))
    return 0


def _warn_of_unused_settings(output: Output, settings: list[UnusedSetting]) -> None:
    for unused in settings:
        output.warn(str(unused))


def _layout_overrides(request: PlanRequest) -> list[str]:
    """Layout keys among the overrides; behind ``--why`` they belong to the layout that is explained."""
    return [text for text in request.overrides if text.startswith("layout.")]


def _load_without_layout(request: PlanRequest) -> Job:
    """The job without layout overrides: the layout to explain may be illegal."""
    others = [text for text in request.overrides if not text.startswith("layout.")]
    return load_job(request.source, *others, on=request.on)


def _refuse_with_why(request: PlanRequest) -> None:
    """Refuse options that have no effect with ``--why``."""
    given = {
        "-o": request.out is not None,
        "--picture": request.picture is not None,
        "--by": request.by != "time",
    }
    for option in (name for name, used in given.items() if used):
        rule = "has no effect with --why, which explains one layout and writes nothing"
        raise UserError(Problem("plan-why-alone", rule, path=option, fix=f"Leave out {option}, or --why"))


def _write_files(plan: Plan, request: PlanRequest) -> list[str]:
    """Write before anything is printed: a reader such as `head` may end the command early."""
    written = []
    if request.out is not None:
        plan.write(request.out)
        written.append(f"\nplan: {request.out}")
    if request.picture is not None:
        plan.draw(request.picture)
        written.append(f"picture: {request.picture}")
    return written


def _sizing_goal(request: PlanRequest) -> SizingLimits | None:
    """Tokens, deadline and budget; None if no cluster is to be sized."""
    limits = {"--deadline": request.deadline, "--max-cost": request.max_cost}
    given = [option for option, value in limits.items() if value is not None]
    if request.tokens is None and not given:
        return None
    if request.tokens is None or not given:
        rule = "needs --deadline or --max-cost too" if not given else "needs --tokens too"
        fix = "Write, for example, --tokens 15e12 --deadline 90d, or --tokens 15e12 --max-cost 2e6"
        raise UserError(Problem("plan-sizing-half", rule, path=[*given, "--tokens"][0], fix=fix))
    rule, tokens, cost = "must be a number above 0", request.tokens, request.max_cost
    if not 0 < tokens < math.inf:
        fix = "Write, for example, --tokens 15e12"
        raise UserError(Problem("plan-bad-tokens", rule, path="--tokens", value=tokens, fix=fix))
    if cost is not None and not 0 < cost < math.inf:
        fix = "Write, for example, --max-cost 2e6"
        raise UserError(Problem("plan-bad-cost", rule, path="--max-cost", value=cost, fix=fix))
    if request.why:
        rule = "explains one layout; it cannot also size a cluster"
        fix = "Leave out --why, or --tokens and its limits"
        raise UserError(Problem("plan-why-sizing", rule, path="--why", fix=fix))
    deadline_s = None if request.deadline is None else parse_duration(request.deadline)
    return SizingLimits(tokens, deadline_s, cost)


def parse_duration(text: str) -> float:
    """Seconds of `90d`, `12h` or `2w`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([hdw])", text.strip())
    if match is None or float(match[1]) == 0:
        rule, fix = "is not a duration", "Write hours, days or weeks, such as 12h, 90d or 2w"
        raise UserError(
            Problem("plan-bad-deadline", rule, path="deadline", value=text, fix=fix, is_argument=True)
        )
    return float(match[1]) * _UNITS[match[2]]


def _describe_sizing(output: Output, sized: SizedCluster) -> None:
    """The sizes that were tried, and the answer."""
    sizing = sized.sizing
    output.print(sized.answer)
    columns = ("devices", "step", "MFU", "whole run", "lost", "cost", "best layout")
    output.print()
    output.table(
        "Sizes tried",
        columns,
        [_cells(size) for size in sizing.tried],
        optional_columns=("best layout", "lost"),
    )
    if sizing.too_small:
        output.print(f"no layout fits on: {', '.join(map(str, sizing.too_small))}")
    output.print("assumed: " + "; ".join(sizing.assumptions))
    output.print()


def _cells(size: ClusterSize) -> tuple[str, ...]:
    best = size.prediction
    return (
        str(size.devices),
        format_seconds(best.step_s),
        f"{best.mfu:.1%}",
        format_days(size.wall_s),
        f"{size.lost_share:.1%}",
        "unknown" if size.cost is None else format_cost(size.cost),
        describe_layout(best.layout),
    )
