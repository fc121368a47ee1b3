"""Plans a loaded job: searches its layouts and explains the choice."""

from __future__ import annotations

from typing import Any

from meshwright.core.errors import Problem, UserError
from meshwright.plan.build import plan_from, summarize, summarize_plan
from meshwright.plan.contract import PlanContract
from meshwright.plan.memory.fit import USABLE_MEMORY
from meshwright.plan.search.alternatives import compare
from meshwright.plan.search.find import CHECKED, Objective, SearchResult
from meshwright.plan.search.planner import search_job
from meshwright.plan.search.reasons import explain_choice
from meshwright.runs.loaded_job import LoadedJob
from meshwright.runs.reporter import Reporter
from meshwright.spec.job import Job
from meshwright.spec.legality.table import with_layout
from meshwright.spec.load import require_runnable
from meshwright.spec.model import DecoderModel

SNAPSHOT_KEY = "elastic.snapshot_every"


def plan_job(
    job: LoadedJob, by: Objective, top: int, explain: bool, reporter: Reporter
) -> tuple[PlanContract, SearchResult]:
    """Search the layouts of a job and predict the best one.

    Raises:
        UserError: No layout fits, or the model has no other objective than time.
    """
    spec = job.spec
    if not isinstance(spec.model, DecoderModel):
        require_runnable(spec)
        if by != "time":
            rule, fix = "ranks layouts of decoders; a ResNet only has replicas", "Leave it out"
            raise UserError(Problem("plan-by-not-here", rule, path="by", value=by, fix=fix, is_argument=True))
    with reporter.search() as progress:
        found = search_job(spec, job.named_layout_keys(), max(top, CHECKED), by, progress)
    reasons = explain_choice(spec, found, neighbours=explain)
    plan = plan_from(found.best[0], reasons, spec.layout.stage_layers is None)
    warn_of_snapshots(job, plan, reporter)
    return plan, found


def warn_of_snapshots(job: LoadedJob, plan: PlanContract, reporter: Reporter) -> None:
    """Warn if the user set ``elastic.snapshot_every``, and snapshots do not fit."""
    if plan.host_memory is not None and plan.host_memory.snapshots_off and job.names(SNAPSHOT_KEY):
        every = plan.job.elastic.snapshot_every
        reporter.warning(
            f"{SNAPSHOT_KEY}={every} has no effect: snapshots off: {plan.host_memory.snapshots_off}"
        )


def summarize_search(plan: PlanContract, found: SearchResult, top: int) -> dict[str, Any]:
    """The plan and its alternatives as plain values."""
    best = found.best[0]
    others = [summarize(p, [compare(best, p, found.objective)]) for p in found.best[1:top]]
    memory = {"usable_bytes": plan.usable_bytes, "usable_share": USABLE_MEMORY}
    return {**found.counts(), **memory, "layouts": [summarize_plan(plan), *others]}


def resolve_layout(job: LoadedJob, reporter: Reporter) -> Job:
    """The job with the layout that it gives, or that the planner chooses for its cluster."""
    if job.spec.layout.mode == "given":
        return job.spec
    with reporter.search() as progress:
        found = search_job(job.spec, job.named_layout_keys(), progress=progress)
    return with_layout(job.spec, found.best[0].layout)
