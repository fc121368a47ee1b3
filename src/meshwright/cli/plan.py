"""``meshwright plan``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.cli.output import Output
from meshwright.cli.plan_picture import check_picture, draw_picture
from meshwright.cli.plan_search import PASS_NAMES, SearchOutcome, given_outcome, is_estimated, search_outcome
from meshwright.cli.plan_sizing import show_sizing
from meshwright.cli.plan_why import show_why
from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_bytes, format_count, format_rate, format_seconds
from meshwright.explain.plan_picture import PlanPicture
from meshwright.explain.stage_table import STAGE_COLUMNS, stage_cells
from meshwright.plan.choose import Candidate, Search
from meshwright.plan.contract import Plan, build_plan, plan_of, write_plan
from meshwright.plan.search.enumerate import pinned_keys
from meshwright.plan.search.find import By
from meshwright.plan.search.sizing import parse_duration
from meshwright.plan.time.flops import peak_rate
from meshwright.plan.time.interval import step_interval
from meshwright.plan.time.pipeline import walk_pipeline
from meshwright.plan.time.probed import is_probed
from meshwright.spec.job import Job
from meshwright.spec.legality import find_problems
from meshwright.spec.load import load_job, read_tree, require_runnable
from meshwright.spec.model import DecoderModel


@dataclass(frozen=True)
class PlanRequest:
    """What was asked on the command line."""

    source: str
    overrides: tuple[str, ...] = ()
    on: str | None = None
    top: int = 50
    by: By = "time"
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
        return show_why(output, asked.source, [*asked.overrides], [*asked.why], asked.on)
    job = load_job(asked.source, asked.overrides, asked.on, to_run=False)
    pins = pinned_keys(job.layout, named_layout_keys(asked.source, asked.overrides))
    sizing = None
    if asked.tokens is not None:
        job, sizing = show_sizing(output, job, asked.tokens, deadline_s, pins)
    outcome: SearchOutcome | RunnableOutcome
    if is_searched(job):
        outcome = search_outcome(output, job, pins, asked.top, asked.by)
    elif job.layout.mode == "given" and find_problems(job) and isinstance(job.model, DecoderModel):
        outcome = given_outcome(job)
    else:
        require_runnable(job)
        if asked.by != "time":
            rule = "ranks what is searched, which are decoders on GPU clusters"
            raise UserError(
                Problem("plan-by-not-here", rule, path="--by", value=asked.by, fix="Leave it out")
            )
        outcome = _runnable_outcome(job, asked.top)
    written = _write_files(outcome, asked)
    outcome.describe(output)
    for sentence in written:
        output.say(sentence)
    output.result(outcome.summary() | ({} if sizing is None else {"sizing": sizing.summary()}))
    return 0


def _write_files(outcome: SearchOutcome | RunnableOutcome, asked: PlanRequest) -> list[str]:
    """Write before anything is said: the exact ledger may still refuse, and `| head` reads no further."""
    written = []
    if asked.out is not None:
        write_plan(outcome.plan(), asked.out)
        written.append(f"\nwritten to {asked.out}")
    if asked.picture is not None:
        draw_picture(outcome, asked.picture)
        written.append(f"picture: {asked.picture}")
    return written


def is_searched(job: Job) -> bool:
    """Whether all layouts are searched, or only those that this machine can run.

    On one device that was probed there is no axis to search, and the step of a job like those that were timed
    is known better.
    """
    known = is_probed(job) and job.cluster.world_size == 1
    return job.layout.mode == "auto" and is_estimated(job) and not known


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


def named_layout_keys(source: str, overrides: Sequence[str]) -> list[str]:
    """Keys of the layout that the user wrote, in the file or as overrides."""
    table = read_tree(source).get("layout")
    named = list(table) if isinstance(table, dict) else []
    return [
        *named,
        *(t.partition("=")[0].removeprefix("layout.") for t in overrides if t.startswith("layout.")),
    ]


@dataclass(frozen=True)
class RunnableOutcome:
    """One process and replicas, predicted to the byte."""

    best: Plan
    shown: list[Plan]
    search: Search
    top: int

    def plan(self) -> Plan:
        """What is written."""
        return self.best

    def describe(self, output: Output) -> None:
        """For people."""
        describe_plan(output, self.best)
        if len(self.search.candidates) > 1:
            rows = [_row(c) for c in self.search.candidates[: min(self.top, 12)]]
            output.say()
            columns = ("layout", "micro-batch", "step", "peak a device", "fits")
            output.table("Layouts, best first", columns, rows)

    def picture(self) -> PlanPicture:
        """What is drawn."""
        job = self.best.job
        tokens = job.train.global_batch * job.data.seq_len
        rates = [tokens / c.time.total_s / c.layout.world_size for c in self.search.fitting]
        return PlanPicture(
            title=f"{job.name}: {self.search.candidates[0].name}",
            memory={
                name.partition(" (")[0]: {line.name: float(line.bytes) for line in rank.lines}
                for name, rank in self.best.classes().items()
            },
            room_bytes=job.cluster.memory_bytes,
            steps=[(c.name, c.time.parts) for c in self.search.candidates],
            rates=np.array(rates),
            unit=job.unit,
            pipeline=_planned_passes(self.best),
        )

    def summary(self) -> dict[str, Any]:
        """For programs."""
        return {
            "evaluated": self.search.evaluated,
            "pruned": 0,
            "illegal": self.search.illegal,
            "fit": len(self.search.fitting),
            "search_s": self.search.seconds,
            "layouts": [plan.summary() for plan in self.shown],
        }


def _runnable_outcome(job: Job, top: int) -> RunnableOutcome:
    plan, search = build_plan(job)
    return RunnableOutcome(
        plan, [plan, *(plan_of(job, c, []) for c in search.candidates[1:top])], search, top
    )


def describe_plan(output: Output, plan: Plan) -> None:
    """The choice, its reasons, its ledger and its collectives."""
    job = plan.job
    cluster = f"{job.cluster.device_name}, {job.cluster.preset or job.cluster.file}"
    ranks, devices = plan.world_size, job.cluster.world_size
    share = (
        f"on {ranks} of {devices} devices" if ranks <= devices else f"in {ranks} ranks on {devices} devices"
    )
    output.say(f"{job.name}: {format_count(plan.parameters)} parameters {share} ({cluster})")
    for reason in plan.reasons:
        output.say(f"  {reason}")
    spread = step_interval(job)
    low, high = format_seconds(plan.step_s * spread.low), format_seconds(plan.step_s * spread.high)
    rate = format_rate(plan.tokens_per_step / plan.step_s, job.unit)
    output.say(
        f"  predicted step {format_seconds(plan.step_s)} ({low} to {high}), {rate}, MFU {plan.mfu:.0%}"
    )
    _, peak = peak_rate(job.cluster, job.train.precision)
    output.say(f"  interval: {spread.basis}; MFU counts against {peak}; rates: {job.cluster.basis}")
    if plan.pipeline is not None:
        output.say()
        output.table("Stages", STAGE_COLUMNS, stage_cells(plan))
    for name, rank in plan.classes().items():
        rows = [(line.name, format_bytes(line.bytes), line.formula) for line in rank.lines]
        rows.append(("peak in a step", format_bytes(rank.peak_bytes), f"at: {rank.peak_at}"))
        output.say()
        output.table(f"Memory of {name}", ("", "bytes", "formula"), rows)
    if plan.collectives:
        _describe_collectives(output, plan)


def _describe_collectives(output: Output, plan: Plan) -> None:
    """Every row; with a column of places where ranks of a pipeline differ."""
    columns = ["axis", "op", "phase", "ranks", "calls", "bytes"]
    moved = [
        [t.axis, t.op, t.phase, str(t.ranks), str(t.calls), format_bytes(t.bytes)] for t in plan.collectives
    ]
    title = "Collectives of every rank, each time"
    if plan.pipeline is not None:
        title, columns = "Collectives of a rank, each time", [*columns, "place in the pipeline"]
        for cells, row in zip(moved, plan.collectives, strict=True):
            cells.append("every" if row.place is None else str(row.place))
    output.say()
    output.table(title, columns, moved)


def _planned_passes(plan: Plan) -> list[tuple[str, list[tuple[str, float, float]]]]:
    """When each place of the pipeline is planned to do what; none without one."""
    if plan.pipeline is None:
        return []
    schedule, walk = walk_pipeline(plan.job, plan.micro_batches, plan.pipeline)
    return [
        (
            f"place {place}",
            [(PASS_NAMES[a.kind.value], s, e) for a, s, e in zip(row, starts, ends, strict=True)],
        )
        for place, (row, starts, ends) in enumerate(
            zip(schedule.ranks, walk.start_s, walk.end_s, strict=True)
        )
    ]


def _row(candidate: Candidate) -> tuple[str, ...]:
    return (
        candidate.name,
        str(candidate.layout.micro_batch),
        format_seconds(candidate.time.total_s),
        format_bytes(candidate.ledger.peak_bytes),
        "yes" if candidate.fits else "no",
    )
