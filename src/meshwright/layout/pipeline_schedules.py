"""The pipeline schedule of a job, and what follows from it: stages, sends and in-flight work per pp rank."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import NamedTuple

from meshwright.core.errors import Problem, UserError
from meshwright.schedule.pipeline.actions import PipelineSchedule, loop_ranks, v_shaped_ranks
from meshwright.schedule.pipeline.build import build_schedule
from meshwright.schedule.pipeline.files import load_schedule
from meshwright.schedule.pipeline.in_flight import STEADY, InFlight, count_in_flight, steady_state_from
from meshwright.spec.job import Job
from meshwright.spec.layout import V_SCHEDULES
from meshwright.spec.model import DecoderModel


def schedule_of(job: Job, micro_batches: int) -> PipelineSchedule:
    """The schedule of a job's pipeline.

    Raises:
        UserError: The schedule file does not fit the job.
    """
    layout = job.layout
    if layout.schedule_file is not None:
        return _require_fit(read_schedule(layout.schedule_file), job, micro_batches)
    return built_schedule(layout.schedule, layout.pp, micro_batches, layout.virtual_stages)


def in_flight_of(job: Job, micro_batches: int, pp_rank: int) -> InFlight:
    """The in-flight micro-batches along the actions of one pp rank.

    Raises:
        UserError: The schedule file does not fit the job.
    """
    layout = job.layout
    if layout.schedule_file is not None:
        schedule_of(job, micro_batches)
        return _count_version(*_version_of(layout.schedule_file))[pp_rank]
    return _count_built(layout.schedule, layout.pp, micro_batches, layout.virtual_stages)[pp_rank]


@functools.lru_cache(maxsize=32)
def built_schedule(name: str, pp: int, micro_batches: int, virtual_stages: int) -> PipelineSchedule:
    """A generated schedule, cached: it does not depend on other axes."""
    return build_schedule(name, pp, micro_batches, virtual_stages)


@functools.lru_cache(maxsize=256)
def _count_built(name: str, pp: int, micro_batches: int, virtual_stages: int) -> tuple[InFlight, ...]:
    """In-flight counts of a generated schedule. They are small, so the cache holds more of them."""
    fewer = steady_state_from(name, pp, micro_batches)
    if fewer == micro_batches:
        return count_in_flight(built_schedule(name, pp, micro_batches, virtual_stages))
    counted = _count_built(name, pp, fewer, virtual_stages)
    return tuple(rank.with_more(micro_batches - fewer, STEADY * pp) for rank in counted)


def read_schedule(path: str) -> PipelineSchedule:
    """The schedule of a file, cached until the file changes."""
    return _read_version(*_version_of(path))


def schedule_version(job: Job) -> int:
    """Modification time of the schedule file in ns, a cache key; 0 without a file."""
    file = job.layout.schedule_file
    return 0 if file is None else _version_of(file)[1]


def _version_of(path: str) -> tuple[Path, int]:
    file = Path(path)
    return file, file.stat().st_mtime_ns if file.exists() else 0


@functools.lru_cache(maxsize=16)
def _read_version(file: Path, modified: int) -> PipelineSchedule:
    return load_schedule(file)


@functools.lru_cache(maxsize=16)
def _count_version(file: Path, modified: int) -> tuple[InFlight, ...]:
    return count_in_flight(_read_version(file, modified))


def _require_fit(schedule: PipelineSchedule, job: Job, micro_batches: int) -> PipelineSchedule:
    """The schedule, if it has the ranks, stages and micro-batches of the job."""
    layout = job.layout
    rule = fix = ""
    if schedule.pp != layout.pp:
        rule, fix = f"is for {schedule.pp} ranks, and layout.pp={layout.pp}", f"Use layout.pp={schedule.pp}"
    elif schedule.micro_batches != micro_batches:
        batch = schedule.micro_batches * (layout.micro_batch or 1) * layout.data_degree
        rule = f"is for {schedule.micro_batches} micro-batches, and a step has {micro_batches} (train."
        rule += f"global_batch={job.train.global_batch}, layout.micro_batch={layout.micro_batch})"
        fix = f"Use train.global_batch={batch}, or a layout.micro_batch that makes {schedule.micro_batches}"
    elif isinstance(job.model, DecoderModel) and schedule.stages > job.model.num_layers:
        rule = f"has {schedule.stages} stages for model.num_layers={job.model.num_layers}"
        fix = "Use fewer stages: each has at least one layer"
    elif layout.stage_layers is not None and len(layout.stage_layers) != schedule.stages:
        rule = f"has {schedule.stages} stages, and layout.stage_layers {len(layout.stage_layers)} numbers"
        fix = f"Give {schedule.stages} numbers, or leave layout.stage_layers out"
    if rule:
        problem = Problem("layout-schedule-file", rule, "layout.schedule_file", layout.schedule_file, fix)
        raise UserError(problem)
    return schedule


def stage_pp_ranks(job: Job) -> tuple[int, ...]:
    """The pp rank of each stage."""
    layout = job.layout
    if layout.schedule_file is not None:
        return read_schedule(layout.schedule_file).stage_ranks
    return _build_pp_ranks(layout.pp, layout.virtual_stages, layout.schedule in V_SCHEDULES)


@functools.lru_cache(maxsize=512)
def _build_pp_ranks(pp: int, virtual_stages: int, v_shaped: bool) -> tuple[int, ...]:
    return v_shaped_ranks(pp) if v_shaped else loop_ranks(pp, virtual_stages)


class StageBoundaries(NamedTuple):
    """Sends of a pp rank to other pp ranks, per micro-batch."""

    forward: int
    """Stages whose next stage is on another rank: they send activations."""
    backward: int
    """Stages whose previous stage is on another rank: they send gradients."""
    targets: int
    """Number of ranks that it sends to."""


def boundaries_of(job: Job, pp_rank: int) -> StageBoundaries:
    """The sends of one pp rank."""
    return list_boundaries(stage_pp_ranks(job))[pp_rank]


@functools.lru_cache(maxsize=512)
def list_boundaries(stage_ranks: tuple[int, ...]) -> tuple[StageBoundaries, ...]:
    """The sends of every pp rank."""
    forward: list[list[int]] = [[] for _ in range(max(stage_ranks) + 1)]
    backward: list[list[int]] = [[] for _ in forward]
    for before, behind in itertools.pairwise(stage_ranks):
        if before != behind:
            forward[before].append(behind)
            backward[behind].append(before)
    return tuple(
        StageBoundaries(len(f), len(b), len({*f, *b})) for f, b in zip(forward, backward, strict=True)
    )
