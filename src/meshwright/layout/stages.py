"""What of the model a rank of a pipeline holds: its stages, each a run of blocks, and their parameters.

The first stage has the embedding and the positions too, the last one the final norm and the head. A tied
head is the embedding: where both ends are on different ranks, each holds a copy, and their gradients are
added up (:data:`TIED_AXIS`); where they are on one rank, the last stage uses the first one's. Without a
pipeline there is one part, which is everything.

Sizes of a stage depend on how many of its blocks are dense and how many have experts, not on which they are.
So they are computed for its representative, once for all alike stages, from its parameters by kind.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.core.errors import Problem, UserError
from meshwright.layout.axes import has_expert_axes, is_expert
from meshwright.layout.ddp_buckets import bucket_parameters
from meshwright.layout.parameters import (
    Parameter,
    list_block,
    list_embeddings,
    list_head,
    list_parameters,
    name_in_block,
    with_gradients,
)
from meshwright.layout.tensor_parallel import local_model
from meshwright.schedule.pipeline.actions import PipelineSchedule, loop_ranks, v_shaped_ranks
from meshwright.schedule.pipeline.build import build_schedule
from meshwright.schedule.pipeline.files import load_schedule
from meshwright.schedule.pipeline.in_flight import STEADY, InFlight, count_in_flight, steady_state_from
from meshwright.spec.job import Job
from meshwright.spec.layout import V_SCHEDULES
from meshwright.spec.model import DecoderModel, Model

TIED_AXIS = "pp_tied"
"""The two ranks of a pipeline that hold a copy of the same embedding."""
TIED_NAME = "embed.weight"


@dataclass(frozen=True)
class StageSpec:
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
    shares_embedding: bool = False
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
        return max(0, self.layers.stop - max(self.layers.start, self.model.dense_layers))

    @functools.cached_property
    def representative(self) -> StageSpec:
        """The stage of this kind that is nearest to the start of the model: alike in every size."""
        if not isinstance(self.model, DecoderModel):
            return self
        first = 0
        if self.model.num_experts:
            first = self.model.dense_layers - (len(self.layers) - self.expert_layers)
        layers = range(first, first + len(self.layers))
        return _intern(StageSpec(self.model, 0, layers, self.first, self.last, self.shares_embedding))

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Its parameters, in registration order, by the names that they have in the whole model."""
        if not isinstance(self.model, DecoderModel):
            return list_parameters(self.model)
        blocks = [p for layer in self.layers for p in list_block(self.model, layer)]
        return (*self._before_blocks(self.model), *blocks, *self._behind_blocks(self.model))

    @functools.cached_property
    def parameter_kinds(self) -> tuple[Parameter, ...]:
        """The same by kind: those of alike blocks are one entry."""
        if not isinstance(self.model, DecoderModel):
            return list_parameters(self.model)
        blocks = [p for layer, times in self.block_kinds for p in list_block(self.model, layer, times)]
        return (*self._before_blocks(self.model), *blocks, *self._behind_blocks(self.model))

    @property
    def block_kinds(self) -> list[tuple[int, int]]:
        """The first dense block and how many there are, then the same of those with experts."""
        experts = self.expert_layers
        dense = len(self.layers) - experts
        kinds = ((self.layers.start, dense), (self.layers.start + dense, experts))
        return [(layer, times) for layer, times in kinds if times]

    def _before_blocks(self, model: DecoderModel) -> list[Parameter]:
        return list_embeddings(model)[: None if self.first else int(self.copies_embedding)]

    def _behind_blocks(self, model: DecoderModel) -> list[Parameter]:
        return list_head(model) if self.last else []

    @property
    def copies_embedding(self) -> bool:
        """Whether its head is a copy of an embedding that the first stage has."""
        return (
            self.last
            and not self.first
            and not self.shares_embedding
            and isinstance(self.model, DecoderModel)
            and self.model.tied_embeddings
        )


@functools.lru_cache(maxsize=4096)
def _intern(part: StageSpec) -> StageSpec:
    """One object for equal stages, so that what is cached on it is computed once."""
    return part


def list_stages(job: Job) -> tuple[StageSpec, ...]:
    """All stages of a settled job, first to last."""
    return _build_stages(local_model(job), *_stage_sizes(job))


def _stage_sizes(job: Job) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layers and pp rank of every stage."""
    counts = job.layout.stage_layers
    if job.layout.pp == 1:
        return (job.model.num_layers if isinstance(job.model, DecoderModel) else 0,), (0,)
    assert counts is not None, "a plan settles the layers of the stages"
    return counts, stage_pp_ranks(job)


@functools.lru_cache(maxsize=64)
def _build_stages(model: Model, counts: tuple[int, ...], homes: tuple[int, ...]) -> tuple[StageSpec, ...]:
    """Stages of so many layers; ``homes`` are their pp ranks."""
    last, shared = len(counts) - 1, len(counts) > 1 and homes[0] == homes[-1]
    tied = shared and isinstance(model, DecoderModel) and model.tied_embeddings
    ends = itertools.accumulate(counts)
    return tuple(
        StageSpec(model, stage, range(end - count, end), stage == 0, stage == last, tied and stage == last)
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
    return built_schedule(layout.schedule, layout.pp, micro_batches, layout.virtual_stages)


def in_flight_of(job: Job, micro_batches: int, pp_rank: int) -> InFlight:
    """What is in flight along the actions of one pp rank of a job's pipeline.

    Raises:
        UserError: The schedule is a file's, which is for another pipeline.
    """
    layout = job.layout
    if layout.schedule_file is not None:
        schedule_of(job, micro_batches)
        return _count_version(*_version_of(layout.schedule_file))[pp_rank]
    return _count_built(layout.schedule, layout.pp, micro_batches, layout.virtual_stages)[pp_rank]


@functools.lru_cache(maxsize=32)
def built_schedule(name: str, pp: int, micro_batches: int, virtual_stages: int) -> PipelineSchedule:
    """A generated schedule; layouts that differ in other axes share it."""
    return build_schedule(name, pp, micro_batches, virtual_stages)


@functools.lru_cache(maxsize=256)
def _count_built(name: str, pp: int, micro_batches: int, virtual_stages: int) -> tuple[InFlight, ...]:
    """Of a generated schedule; the counts are small, so more of them are kept than of schedules."""
    fewer = steady_state_from(name, pp, micro_batches)
    if fewer == micro_batches:
        return count_in_flight(built_schedule(name, pp, micro_batches, virtual_stages))
    counted = _count_built(name, pp, fewer, virtual_stages)
    return tuple(rank.with_more(micro_batches - fewer, STEADY * pp) for rank in counted)


def read_schedule(path: str) -> PipelineSchedule:
    """A file's schedule; read once, unless it changes."""
    return _read_version(*_version_of(path))


def schedule_version(job: Job) -> int:
    """When the file of a job's schedule was last changed; 0 where the schedule is not a file's."""
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


def pp_rank_of(job: Job, rank: int) -> int:
    """A rank's place in its pipeline, the outermost axis."""
    return rank // (job.layout.world_size // job.layout.pp)


def stage_pp_ranks(job: Job) -> tuple[int, ...]:
    """The place of the pipeline that holds each stage."""
    layout = job.layout
    if layout.schedule_file is not None:
        return read_schedule(layout.schedule_file).stage_ranks
    return _build_pp_ranks(layout.pp, layout.virtual_stages, layout.schedule in V_SCHEDULES)


@functools.lru_cache(maxsize=512)
def _build_pp_ranks(pp: int, virtual_stages: int, vee: bool) -> tuple[int, ...]:
    return v_shaped_ranks(pp) if vee else loop_ranks(pp, virtual_stages)


def local_stages(job: Job, pp_rank: int) -> tuple[StageSpec, ...]:
    """The stages of the ranks at one place of the pipelines."""
    return _split_stages(local_model(job), *_stage_sizes(job))[pp_rank]


def unsharded_stages(job: Job, pp_rank: int) -> tuple[StageSpec, ...]:
    """The same stages with matrices that no axis shards."""
    return _split_stages(job.model, *_stage_sizes(job))[pp_rank]


@functools.lru_cache(maxsize=64)
def _split_stages(
    model: Model, counts: tuple[int, ...], homes: tuple[int, ...]
) -> tuple[tuple[StageSpec, ...], ...]:
    """The stages of every pp rank."""
    stages = _build_stages(model, counts, homes)
    return tuple(
        tuple(part for part, home in zip(stages, homes, strict=True) if home == pp_rank)
        for pp_rank in range(max(homes) + 1)
    )


class StageBoundaries(NamedTuple):
    """What a pp rank sends to other ranks."""

    forward: int
    """Stages whose next one is elsewhere."""
    backward: int
    """Stages whose previous one is elsewhere."""
    targets: int
    """Other ranks that it sends to."""


def boundaries_of(job: Job, pp_rank: int) -> StageBoundaries:
    """The borders of the ranks at one place of the pipelines."""
    return _list_boundaries(stage_pp_ranks(job))[pp_rank]


@functools.lru_cache(maxsize=512)
def _list_boundaries(homes: tuple[int, ...]) -> tuple[StageBoundaries, ...]:
    """Of every pp rank."""
    forward: list[list[int]] = [[] for _ in range(max(homes) + 1)]
    backward: list[list[int]] = [[] for _ in forward]
    for before, behind in itertools.pairwise(homes):
        if before != behind:
            forward[before].append(behind)
            backward[behind].append(before)
    return tuple(
        StageBoundaries(len(f), len(b), len({*f, *b})) for f, b in zip(forward, backward, strict=True)
    )


def representative_pp_rank(job: Job, pp_rank: int) -> int:
    """The first place whose ranks hold and send as much as those at a place: most of a pipeline are alike."""
    return _find_representatives(local_model(job), *_stage_sizes(job))[pp_rank]


@functools.lru_cache(maxsize=64)
def _find_representatives(model: Model, counts: tuple[int, ...], homes: tuple[int, ...]) -> tuple[int, ...]:
    known: dict[Any, int] = {}
    borders, places = _list_boundaries(homes), enumerate(_split_stages(model, counts, homes))
    keys = [
        (pp_rank == 0, borders[pp_rank], *(part.representative for part in parts))
        for pp_rank, parts in places
    ]
    return tuple(known.setdefault(key, pp_rank) for pp_rank, key in enumerate(keys))


def local_parameters(job: Job, pp_rank: int) -> tuple[Parameter, ...]:
    """All parameters of the ranks at one place of the pipelines; no two of its stages share one."""
    return with_gradients(job, tuple(p for part in local_stages(job, pp_rank) for p in part.parameters))


def local_parameter_kinds(job: Job, pp_rank: int) -> tuple[Parameter, ...]:
    """The same by kind: those of alike blocks are one entry."""
    return with_gradients(job, list_parameter_kinds(local_stages(job, pp_rank)))


def list_parameter_kinds(parts: Sequence[StageSpec]) -> tuple[Parameter, ...]:
    """The parameters of some stages by kind: those of alike blocks are one entry."""
    return _merge_kinds(tuple(part.representative for part in parts))


@functools.lru_cache(maxsize=4096)
def _merge_kinds(parts: tuple[StageSpec, ...]) -> tuple[Parameter, ...]:
    found: dict[tuple[str, tuple[int, ...]], Parameter] = {}
    for parameter in (p for part in parts for p in part.parameter_kinds):
        key = name_in_block(parameter.name), parameter.shape
        repeats = parameter.repeats + (found[key].repeats if key in found else 0)
        found[key] = dataclasses.replace(found.get(key, parameter), repeats=repeats)
    return tuple(found.values())


def stage_buckets(job: Job, pp_rank: int) -> list[list[list[str]]]:
    """The gradient buckets of each stage of a place.

    Where experts have axes of their own, they have buckets of their own, behind the others.
    """
    return [
        [
            [p.name for p in bucket]
            for bucket in bucket_stage(part, has_expert_axes(job), job.layout.bucket_mb)
        ]
        for part in local_stages(job, pp_rank)
    ]


@functools.lru_cache(maxsize=512)
def bucket_stage(part: StageSpec, apart: bool, bucket_mb: float) -> tuple[tuple[Parameter, ...], ...]:
    """The gradient buckets of one stage.

    Args:
        part: The stage.
        apart: Whether experts have axes, and so buckets, of their own.
        bucket_mb: The size at which a bucket closes.
    """
    named = {p.name: p for p in part.parameters}
    experts = [p for p in part.parameters if apart and is_expert(p.name)]
    dense = [p for p in part.parameters if not (apart and is_expert(p.name))]
    buckets = [names for kind in (dense, experts) for names in bucket_parameters(kind, bucket_mb)]
    return tuple(tuple(named[name] for name in names) for names in buckets)


class BucketKinds(NamedTuple):
    """The gradient buckets of one stage, of which most are alike."""

    kinds: tuple[tuple[Parameter, ...], ...]
    """The distinct ones, each with its parameters by kind."""
    order: tuple[int, ...]
    """The kind of each bucket."""


@functools.lru_cache(maxsize=512)
def bucket_kinds(part: StageSpec, apart: bool, bucket_mb: float) -> BucketKinds:
    """The buckets of :func:`bucket_stage` by kind."""
    known: dict[tuple[str, tuple[int, ...]], Parameter] = {}
    found: dict[tuple[tuple[Parameter, int], ...], int] = {}
    order = []
    for bucket in bucket_stage(part, apart, bucket_mb):
        kinds = Counter(known.setdefault((name_in_block(p.name), p.shape), p) for p in bucket)
        order.append(found.setdefault(tuple(kinds.items()), len(found)))
    distinct = (tuple(dataclasses.replace(p, repeats=times) for p, times in kinds) for kinds in found)
    return BucketKinds(tuple(distinct), tuple(order))


@functools.lru_cache(maxsize=4096)
def count_buckets(part: StageSpec, apart: bool, bucket_mb: float) -> tuple[int, int]:
    """How many gradient buckets of a stage are dense, and how many are of experts with axes of their own."""
    buckets = bucket_stage(part, apart, bucket_mb)
    experts = sum(apart and is_expert(bucket[0].name) for bucket in buckets)
    return len(buckets) - experts, experts


def local_buckets(job: Job, pp_rank: int) -> list[list[str]]:
    """The gradient buckets of all stages of a place."""
    return [names for buckets in stage_buckets(job, pp_rank) for names in buckets]


def find_tied_pp_ranks(job: Job) -> tuple[int, ...]:
    """The places of the pipeline that hold a tied embedding; none where it is not tied, or never cut."""
    if not list_stages(job)[-1].copies_embedding:
        return ()
    homes = stage_pp_ranks(job)
    return tuple(sorted({homes[0], homes[-1]}))


def locate_parameters(job: Job) -> list[tuple[Parameter, int]]:
    """Every parameter of the whole model, and the first place of the pipeline that holds it."""
    homes: dict[str, int] = {}
    for pp_rank in range(job.layout.pp):
        for parameter in local_parameters(job, pp_rank):
            homes.setdefault(parameter.name, pp_rank)
    return [(parameter, homes[parameter.name]) for parameter in list_parameters(job.model)]


def saved_parameter_kinds(job: Job, pp_rank: int, parts: Sequence[StageSpec]) -> tuple[Parameter, ...]:
    """What the ranks at a place add to a checkpoint, by kind: all but an embedding that an earlier place has.

    Args:
        job: With its layout settled.
        pp_rank: The rank's index on the axis ``pp``.
        parts: The stages of that place.
    """
    copied = pp_rank in find_tied_pp_ranks(job)[1:]
    return tuple(p for p in list_parameter_kinds(parts) if not (copied and p.name == TIED_NAME))
