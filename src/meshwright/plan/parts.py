"""What of the model a rank of a pipeline holds: its stages, each a run of blocks, and their parameters.

The first stage has the embedding and the positions too, the last one the final norm and the head. A tied
head is the embedding: where both ends are on different ranks, each holds a copy, and their gradients are
added up (:data:`TIED_AXIS`); where they are on one rank, the last stage uses the first one's. Without a
pipeline there is one part, which is everything.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.errors import Problem, UserError
from meshwright.plan.axes import experts_apart, is_expert
from meshwright.plan.buckets import bucket_parameters
from meshwright.plan.shapes import Parameter, list_parameters, with_gradients
from meshwright.plan.tensor import held_model
from meshwright.schedule.actions import PipelineSchedule, loop_ranks, vee_ranks
from meshwright.schedule.build import build_schedule
from meshwright.schedule.files import load_schedule
from meshwright.spec.job import Job
from meshwright.spec.layout import V_SCHEDULES
from meshwright.spec.model import DecoderModel, Model

TIED_AXIS = "pp_tied"
"""The two ranks of a pipeline that hold a copy of the same embedding."""
TIED_NAME = "embed.weight"


@dataclass(frozen=True)
class Part:
    """One stage, with the matrices of one rank of ``tp``."""

    model: Model
    """All layers of it."""
    stage: int
    layers: range
    """Its blocks."""
    first: bool
    """Whether it reads the tokens: embedding and positions are here."""
    last: bool
    """Whether it makes the loss: final norm and head are here."""
    lent: bool = False
    """Whether its head is the embedding of the first stage, which is on the same rank."""

    @property
    def whole(self) -> bool:
        """Whether it is all of the model."""
        return self.first and self.last

    @property
    def expert_layers(self) -> int:
        """Blocks of it that route their tokens to experts."""
        if not isinstance(self.model, DecoderModel) or not self.model.num_experts:
            return 0
        return sum(layer >= self.model.dense_layers for layer in self.layers)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Its parameters, in registration order, by the names that they have in the whole model."""
        return _list_part(self)

    @property
    def borrows(self) -> bool:
        """Whether its head is a copy of an embedding that the first stage has."""
        return (
            self.last
            and not self.first
            and not self.lent
            and isinstance(self.model, DecoderModel)
            and self.model.tied_embeddings
        )


@functools.lru_cache(maxsize=256)
def _list_part(part: Part) -> tuple[Parameter, ...]:
    return tuple(p for p in list_parameters(part.model) if part.whole or _is_in(part, p.name))


def _is_in(part: Part, name: str) -> bool:
    owner, _, rest = name.partition(".")
    if owner == "blocks":
        return int(rest.partition(".")[0]) in part.layers
    if owner == "embed":
        return part.first or part.borrows
    return part.first if owner == "positions" else part.last


def list_stages(job: Job) -> tuple[Part, ...]:
    """All stages of a settled job, first to last."""
    model, counts = held_model(job), job.layout.stage_layers
    if job.layout.pp == 1:
        layers = range(model.num_layers if isinstance(model, DecoderModel) else 0)
        return (Part(model, 0, layers, first=True, last=True),)
    assert counts is not None, "a plan settles the layers of the stages"
    homes, last = stage_homes(job), len(counts) - 1
    tied = isinstance(model, DecoderModel) and model.tied_embeddings and homes[0] == homes[-1]
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    return tuple(
        Part(model, stage, range(end - count, end), stage == 0, stage == last, tied and stage == last)
        for stage, (count, end) in enumerate(zip(counts, ends, strict=True))
    )


def schedule_of(job: Job, micro_batches: int) -> PipelineSchedule:
    """The schedule of a job's pipeline.

    Raises:
        UserError: It is a file's, which is for another pipeline.
    """
    layout = job.layout
    if layout.schedule_file is not None:
        return _require_fit(read_schedule(layout.schedule_file), job, micro_batches)
    return _build(layout.schedule, layout.pp, micro_batches, layout.virtual_stages)


@functools.lru_cache(maxsize=32)
def _build(name: str, pp: int, micro_batches: int, virtual_stages: int) -> PipelineSchedule:
    return build_schedule(name, pp, micro_batches, virtual_stages)


def read_schedule(path: str) -> PipelineSchedule:
    """A file's schedule; read once, unless it changes."""
    file = Path(path)
    return _read_version(file, file.stat().st_mtime_ns if file.exists() else 0)


@functools.lru_cache(maxsize=16)
def _read_version(file: Path, modified: int) -> PipelineSchedule:
    return load_schedule(file)


def _require_fit(schedule: PipelineSchedule, job: Job, micro_batches: int) -> PipelineSchedule:
    """A file's schedule, if it is for as many ranks and micro-batches as the job has."""
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
        fix = "Use fewer stages: each holds at least one layer"
    elif layout.stage_layers is not None and len(layout.stage_layers) != schedule.stages:
        rule = f"has {schedule.stages} stages, and layout.stage_layers {len(layout.stage_layers)} numbers"
        fix = f"Give {schedule.stages} numbers, or leave layout.stage_layers out"
    if rule:
        problem = Problem("layout-schedule-file", rule, "layout.schedule_file", layout.schedule_file, fix)
        raise UserError(problem)
    return schedule


def pipeline_rank(job: Job, rank: int) -> int:
    """A rank's place in its pipeline, the outermost axis."""
    return rank // (job.layout.world_size // job.layout.pp)


def stage_homes(job: Job) -> tuple[int, ...]:
    """The place of the pipeline that holds each stage."""
    layout = job.layout
    if layout.schedule_file is not None:
        return read_schedule(layout.schedule_file).stage_ranks
    return (
        vee_ranks(layout.pp)
        if layout.schedule in V_SCHEDULES
        else loop_ranks(layout.pp, layout.virtual_stages)
    )


def held_parts(job: Job, place: int) -> tuple[Part, ...]:
    """The stages of the ranks at one place of the pipelines."""
    homes = stage_homes(job)
    return tuple(part for part in list_stages(job) if homes[part.stage] == place)


def held_parameters(job: Job, place: int) -> tuple[Parameter, ...]:
    """All parameters of the ranks at one place of the pipelines; one that two stages share, once."""
    return with_gradients(job, merge_parameters(held_parts(job, place)))


@functools.lru_cache(maxsize=256)
def merge_parameters(parts: tuple[Part, ...]) -> tuple[Parameter, ...]:
    """All parameters of some stages; one that two of them share, once, with the first."""
    return tuple({p.name: p for part in parts for p in part.parameters}.values())


def stage_buckets(job: Job, place: int) -> list[list[list[str]]]:
    """The gradient buckets of each stage of a place; a parameter that two stages share is the first one's.

    Where experts have axes of their own, they have buckets of their own, behind the others.
    """
    seen: set[str] = set()
    found = []
    apart = experts_apart(job)
    for part in held_parts(job, place):
        own = [p for p in part.parameters if p.name not in seen]
        seen |= {p.name for p in own}
        experts = [p for p in own if apart and is_expert(p.name)]
        dense = [p for p in own if not (apart and is_expert(p.name))]
        found.append([names for kind in (dense, experts) for names in _bucket(job, kind)])
    return found


def _bucket(job: Job, parameters: list[Parameter]) -> list[list[str]]:
    return bucket_parameters(parameters, job.layout.bucket_mb)


def held_buckets(job: Job, place: int) -> list[list[str]]:
    """The gradient buckets of all stages of a place."""
    return [names for buckets in stage_buckets(job, place) for names in buckets]


def find_tied_places(job: Job) -> tuple[int, ...]:
    """The places of the pipeline that hold a tied embedding; none where it is not tied, or never cut."""
    if not list_stages(job)[-1].borrows:
        return ()
    homes = stage_homes(job)
    return tuple(sorted({homes[0], homes[-1]}))


def list_homes(job: Job) -> list[tuple[Parameter, int]]:
    """Every parameter of the whole model, and the first place of the pipeline that holds it."""
    homes: dict[str, int] = {}
    for place in range(job.layout.pp):
        for parameter in held_parameters(job, place):
            homes.setdefault(parameter.name, place)
    return [(parameter, homes[parameter.name]) for parameter in list_parameters(job.model)]


def saved_parameters(job: Job, place: int) -> tuple[Parameter, ...]:
    """What the ranks at a place add to a checkpoint: all they hold but a borrowed embedding."""
    here = {parameter.name for parameter, home in list_homes(job) if home == place}
    return tuple(p for p in held_parameters(job, place) if p.name in here)
