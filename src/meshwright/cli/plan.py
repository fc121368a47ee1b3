"""``meshwright plan``: search, show, write."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.cli.output import Output
from meshwright.cli.plan_picture import check_picture, draw_picture, gather_picture
from meshwright.cli.plan_sizing import show_sizing
from meshwright.cli.plan_text import describe_plan, describe_ranking
from meshwright.cli.plan_why import show_why
from meshwright.cli.search_progress import search_progress
from meshwright.core.errors import Problem, UserError
from meshwright.plan.build import plan_from, summarize, summarize_plan
from meshwright.plan.contract import Plan, write_plan
from meshwright.plan.memory.fit import USABLE_MEMORY
from meshwright.plan.search.alternatives import compare
from meshwright.plan.search.find import CHECKED, Objective, SearchResult
from meshwright.plan.search.planner import search_job
from meshwright.plan.search.reasons import explain_choice
from meshwright.plan.search.space import pinned_keys
from meshwright.plan.sizing import parse_duration
from meshwright.spec.load import load_job, named_layout_keys, require_runnable
from meshwright.spec.model import DecoderModel


@dataclass(frozen=True)
class PlanRequest:
    """What was asked on the command line."""

    source: str
    overrides: tuple[str, ...] = ()
    on: str | None = None
    top: int = 50
    by: Objective = "time"
    why: tuple[str, ...] = ()
    tokens: float | None = None
    deadline: str | None = None
    picture: Path | None = None
    out: Path | None = None


def show_plan(output: Output, asked: PlanRequest) -> int:
    """Rank the layouts and show the best one whole, or explain one, or size the cluster."""
    if asked.picture is not None:
        check_picture(asked.picture)
    deadline_s = _sizing_deadline(asked)
    if asked.why:
        _refuse_with_why(asked)
        return show_why(output, asked.source, [*asked.overrides], [*asked.why], asked.on)
    job = load_job(asked.source, asked.overrides, asked.on, to_run=False)
    named = named_layout_keys(asked.source, asked.overrides)
    sizing = None
    if asked.tokens is not None:
        job, sizing = show_sizing(output, job, asked.tokens, deadline_s, pinned_keys(job.layout, named))
    if not isinstance(job.model, DecoderModel):
        require_runnable(job)
        if asked.by != "time":
            rule = "ranks layouts of decoders; a ResNet has replicas alone"
            raise UserError(
                Problem("plan-by-not-here", rule, path="--by", value=asked.by, fix="Leave it out")
            )
    with search_progress(output) as progress:
        found = search_job(job, named, max(asked.top, CHECKED), asked.by, progress)
    reasons = explain_choice(job, found, neighbours=True)
    plan = plan_from(found.best[0], reasons, job.layout.stage_layers is None)
    written = _write_files(plan, found, asked)
    describe_plan(output, plan)
    describe_ranking(output, found, asked.top)
    for sentence in written:
        output.print(sentence)
    output.result(_summary(plan, found, asked.top) | ({} if sizing is None else {"sizing": sizing.summary()}))
    return 0


def _refuse_with_why(asked: PlanRequest) -> None:
    """Refuse options that ``--why`` has no use for."""
    given = {"-o": asked.out is not None, "--picture": asked.picture is not None, "--by": asked.by != "time"}
    for option in (name for name, used in given.items() if used):
        rule = "has no effect with --why, which explains one layout and writes nothing"
        raise UserError(Problem("plan-why-alone", rule, path=option, fix=f"Leave out {option}, or --why"))


def _summary(plan: Plan, found: SearchResult, top: int) -> dict[str, Any]:
    """For programs."""
    best = found.best[0]
    others = [summarize(p, [compare(best, p, found.objective)]) for p in found.best[1:top]]
    memory = {"usable_bytes": plan.usable_bytes, "usable_share": USABLE_MEMORY}
    return {**found.counts(), **memory, "layouts": [summarize_plan(plan), *others]}


def _write_files(plan: Plan, found: SearchResult, asked: PlanRequest) -> list[str]:
    """Write before anything is shown: `| head` reads no further."""
    written = []
    if asked.out is not None:
        write_plan(plan, asked.out)
        written.append(f"\nwritten to {asked.out}")
    if asked.picture is not None:
        draw_picture(gather_picture(plan, found), asked.picture)
        written.append(f"picture: {asked.picture}")
    return written


def _sizing_deadline(asked: PlanRequest) -> float:
    """Seconds of the deadline; 0 where none is asked for."""
    if (asked.tokens is None) != (asked.deadline is None):
        given, missing = (
            ("--tokens", "--deadline") if asked.tokens is not None else ("--deadline", "--tokens")
        )
        fix = "Write, say, --tokens 15e12 --deadline 90d"
        raise UserError(Problem("plan-sizing-half", f"needs {missing} beside it", path=given, fix=fix))
    if asked.tokens is None or asked.deadline is None:
        return 0.0
    if not asked.tokens > 0 or math.isinf(asked.tokens):
        rule, fix = "is not a number of tokens", "Write, say, --tokens 15e12"
        raise UserError(Problem("plan-bad-tokens", rule, path="--tokens", value=asked.tokens, fix=fix))
    if asked.why:
        rule, fix = (
            "explains one layout; it cannot size a cluster too",
            "Leave out --why, or --tokens and --deadline",
        )
        raise UserError(Problem("plan-why-sizing", rule, path="--why", fix=fix))
    return parse_duration(asked.deadline)
