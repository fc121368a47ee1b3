"""``meshwright plan --picture``: checks the name early, gathers what is drawn, writes the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from meshwright.core.errors import Problem, UserError
from meshwright.layout.text import describe_layout
from meshwright.plan.contract import Plan, RankPrediction
from meshwright.plan.memory.fit import MemoryNeed
from meshwright.plan.search.find import SearchResult
from meshwright.plan.time.pipeline import walk_pipeline
from meshwright.report.plan_plot import PlanPicture, draw_plan
from meshwright.spec.job import Job

KINDS = ("svg", "png")
PASS_NAMES = {"F": "forward", "B": "backward", "W": "weight gradient"}


def check_picture(path: Path) -> None:
    """Refuse what cannot be drawn before anything is searched."""
    if path.suffix.removeprefix(".").lower() not in KINDS:
        rule, fix = "is neither .svg nor .png", "Write, say, --picture plan.svg"
        raise UserError(Problem("plan-picture-kind", rule, path="--picture", value=str(path), fix=fix))


def gather_picture(plan: Plan, found: SearchResult) -> PlanPicture:
    """What is drawn of a plan and of the search that led to it."""
    job = plan.job
    device_s = (
        np.concatenate(found.rates)
        if found.rates
        else np.array([p.step_s * p.layout.world_size for p in found.best])
    )
    return PlanPicture(
        title=f"{job.name}: {describe_layout(job.layout)}",
        memory={name.partition(" (")[0]: _memory_bar(job, rank) for name, rank in plan.classes().items()},
        room_bytes=plan.usable_bytes,
        steps=[(describe_layout(p.layout), p.time.parts) for p in found.best],
        rates=plan.tokens_per_step / device_s,
        unit=job.unit,
        pipeline=_planned_passes(plan),
    )


def _memory_bar(job: Job, rank: RankPrediction) -> dict[str, float]:
    """What a rank needs, line by line: of a steady step, and what comes to that."""
    need = MemoryNeed.of(job, rank.peak_bytes, rank.first_peak_bytes, rank.checkpoint_bytes)
    bar = {line.name: float(line.bytes) for line in rank.lines}
    more = {
        f"{need.limited_by} beyond it": max(need.peaks.values()) - need.steady_step,
        "allocator": need.allocator,
        "context": need.context,
    }
    return bar | {name: float(size) for name, size in more.items() if size}


def _planned_passes(plan: Plan) -> list[tuple[str, list[tuple[str, float, float]]]]:
    """When each pp rank is planned to do what; none without a pipeline."""
    if plan.pipeline is None:
        return []
    schedule, walk = walk_pipeline(plan.job, plan.micro_batches, plan.pipeline)
    return [
        (
            f"pp rank {rank}",
            [(PASS_NAMES[a.kind.value], s, e) for a, s, e in zip(row, starts, ends, strict=True)],
        )
        for rank, (row, starts, ends) in enumerate(zip(schedule.ranks, walk.start_s, walk.end_s, strict=True))
    ]


def draw_picture(picture: PlanPicture, path: Path) -> None:
    """Write the picture."""
    content = draw_plan(picture, path.suffix.removeprefix(".").lower())
    try:
        path.write_bytes(content)
    except OSError as error:
        rule = f"cannot be written: {error}"
        raise UserError(Problem("plan-picture-unwritable", rule, path=str(path))) from None
