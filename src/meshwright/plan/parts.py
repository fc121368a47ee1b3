"""What of the model a rank of a pipeline holds: its stages, each a run of blocks, and their parameters.

The first stage has the embedding and the positions too, the last one the final norm and the head. A tied
head is the embedding: where both ends are on different ranks, each holds a copy, and their gradients are
added up (:data:`TIED_AXIS`). Without a pipeline there is one part, which is everything.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from meshwright.plan.buckets import bucket_parameters
from meshwright.plan.shapes import Parameter, list_parameters
from meshwright.plan.tensor import held_model
from meshwright.schedule.actions import PipelineSchedule, Placement, rank_of_stage
from meshwright.schedule.build import build_schedule
from meshwright.spec.job import Job
from meshwright.spec.layout import V_SCHEDULES
from meshwright.spec.model import DecoderModel, Model

EMBEDDING = "embed.weight"
TIED_AXIS = "pp_tied"
"""The two ranks of a pipeline that hold a copy of the same embedding."""


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

    @property
    def whole(self) -> bool:
        """Whether it is all of the model."""
        return self.first and self.last

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
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    return tuple(
        Part(model, stage, range(end - count, end), stage == 0, stage == len(counts) - 1)
        for stage, (count, end) in enumerate(zip(counts, ends, strict=True))
    )


def schedule_of(job: Job, micro_batches: int) -> PipelineSchedule:
    """The schedule of a job's pipeline."""
    layout = job.layout
    return build_schedule(layout.schedule, layout.pp, micro_batches, layout.virtual_stages)


def pipeline_rank(job: Job, rank: int) -> int:
    """A rank's place in its pipeline, the outermost axis."""
    return rank // (job.layout.world_size // job.layout.pp)


def stage_place(job: Job, stage: int) -> int:
    """The place of the pipeline that holds a stage."""
    placement = Placement.VEE if job.layout.schedule in V_SCHEDULES else Placement.LOOP
    return rank_of_stage(stage, job.layout.pp, placement)


def held_parts(job: Job, place: int) -> tuple[Part, ...]:
    """The stages of the ranks at one place of the pipelines."""
    return tuple(part for part in list_stages(job) if stage_place(job, part.stage) == place)


def held_parameters(job: Job, place: int) -> tuple[Parameter, ...]:
    """All parameters of the ranks at one place of the pipelines; one that two stages share, once."""
    return merge_parameters(held_parts(job, place))


@functools.lru_cache(maxsize=256)
def merge_parameters(parts: tuple[Part, ...]) -> tuple[Parameter, ...]:
    """All parameters of some stages; one that two of them share, once, with the first."""
    return tuple({p.name: p for part in parts for p in part.parameters}.values())


def held_buckets(job: Job, place: int) -> list[list[str]]:
    """Names of parameters whose gradients are reduced together; no bucket has those of two stages."""
    buckets: list[list[str]] = []
    seen: set[str] = set()
    for part in held_parts(job, place):
        own = [p for p in part.parameters if p.name not in seen]
        seen.update(p.name for p in own)
        buckets += bucket_parameters(own, job.layout.bucket_mb)
    return buckets


def tied_apart(job: Job) -> bool:
    """Whether the embedding and the head that is tied to it are on different ranks."""
    last = list_stages(job)[-1]
    return last.borrows and stage_place(job, last.stage) != stage_place(job, 0)


def saved_parameters(job: Job, place: int) -> tuple[Parameter, ...]:
    """What the ranks at a place add to a checkpoint: all they hold but a borrowed embedding."""
    borrowed = tied_apart(job) and any(part.borrows for part in held_parts(job, place))
    return tuple(p for p in held_parameters(job, place) if not (borrowed and p.name == EMBEDDING))
