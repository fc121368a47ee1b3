"""The stages of pipeline parallel: the blocks and parameters of each pp rank.

A stage is a range of blocks. The first stage also has the token and position embeddings, the last one the
final norm and the head. A tied head is the embedding. If both ends are on different ranks, each has a copy,
and their gradients are all-reduced over :data:`TIED_AXIS`. If they are on one rank, the last stage uses the
embedding of the first. Without a pipeline there is one stage, the whole model.

The sizes of a stage depend only on the number of its dense blocks and of its blocks with experts. They are
computed once for all identical stages, for the representative stage, from its parameters by kind.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.layout.parameters import (
    Parameter,
    list_block,
    list_embeddings,
    list_head,
    list_parameters,
    name_in_block,
    with_gradients,
)
from meshwright.layout.pipeline_schedules import list_boundaries, stage_pp_ranks
from meshwright.layout.tensor_parallel import local_model
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel, Model

TIED_AXIS = "pp_tied"
"""The two pp ranks with a copy of the tied embedding."""
TIED_NAME = "embed.weight"


@dataclass(frozen=True)
class StageSpec:
    """One pipeline stage, with the shapes of one tp rank."""

    model: Model
    """The whole model."""
    stage: int
    layers: range
    """Indices of its blocks."""
    first: bool
    """Whether it is the first stage, with the embeddings."""
    last: bool
    """Whether it is the last stage, with final norm, head and loss."""
    shares_embedding: bool = False
    """Whether its tied head is the embedding of the first stage on the same rank."""

    @property
    def whole(self) -> bool:
        """Whether it is the whole model."""
        return self.first and self.last

    @property
    def expert_layers(self) -> int:
        """Number of its blocks with experts."""
        if not isinstance(self.model, DecoderModel) or not self.model.num_experts:
            return 0
        return max(0, self.layers.stop - max(self.layers.start, self.model.dense_layers))

    @functools.cached_property
    def representative(self) -> StageSpec:
        """The stage of the same kind nearest to the start of the model; all sizes are equal."""
        if not isinstance(self.model, DecoderModel):
            return self
        first = 0
        if self.model.num_experts:
            first = self.model.dense_layers - (len(self.layers) - self.expert_layers)
        layers = range(first, first + len(self.layers))
        return _intern(StageSpec(self.model, 0, layers, self.first, self.last, self.shares_embedding))

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Its parameters in registration order, with the names of the whole model."""
        if not isinstance(self.model, DecoderModel):
            return list_parameters(self.model)
        blocks = [p for layer in self.layers for p in list_block(self.model, layer)]
        return (*self._before_blocks(self.model), *blocks, *self._after_blocks(self.model))

    @functools.cached_property
    def parameter_kinds(self) -> tuple[Parameter, ...]:
        """Its parameters by kind: one entry for all identical blocks."""
        if not isinstance(self.model, DecoderModel):
            return list_parameters(self.model)
        blocks = [p for layer, times in self.block_kinds for p in list_block(self.model, layer, times)]
        return (*self._before_blocks(self.model), *blocks, *self._after_blocks(self.model))

    @property
    def block_kinds(self) -> list[tuple[int, int]]:
        """The first dense block and the number of dense blocks; then the same for blocks with experts."""
        experts = self.expert_layers
        dense = len(self.layers) - experts
        kinds = ((self.layers.start, dense), (self.layers.start + dense, experts))
        return [(layer, times) for layer, times in kinds if times]

    def _before_blocks(self, model: DecoderModel) -> list[Parameter]:
        return list_embeddings(model)[: None if self.first else int(self.copies_embedding)]

    def _after_blocks(self, model: DecoderModel) -> list[Parameter]:
        return list_head(model) if self.last else []

    @property
    def copies_embedding(self) -> bool:
        """Whether its tied head is a copy of the embedding of the first stage on another rank."""
        return (
            self.last
            and not self.first
            and not self.shares_embedding
            and isinstance(self.model, DecoderModel)
            and self.model.tied_embeddings
        )


@functools.lru_cache(maxsize=4096)
def _intern(part: StageSpec) -> StageSpec:
    """One object for equal stages, which share cached properties."""
    return part


def list_stages(job: Job) -> tuple[StageSpec, ...]:
    """All stages of a job with a complete layout, first to last."""
    return _build_stages(local_model(job), *_stage_sizes(job))


def _stage_sizes(job: Job) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The number of layers and the pp rank of every stage."""
    counts = job.layout.stage_layers
    if job.layout.pp == 1:
        return (job.model.num_layers if isinstance(job.model, DecoderModel) else 0,), (0,)
    assert counts is not None, "a plan assigns layers to stages"
    return counts, stage_pp_ranks(job)


@functools.lru_cache(maxsize=64)
def _build_stages(
    model: Model, counts: tuple[int, ...], stage_ranks: tuple[int, ...]
) -> tuple[StageSpec, ...]:
    """Stages with these layer counts; ``stage_ranks`` are their pp ranks."""
    last, shared = len(counts) - 1, len(counts) > 1 and stage_ranks[0] == stage_ranks[-1]
    tied = shared and isinstance(model, DecoderModel) and model.tied_embeddings
    ends = itertools.accumulate(counts)
    return tuple(
        StageSpec(model, stage, range(end - count, end), stage == 0, stage == last, tied and stage == last)
        for stage, (count, end) in enumerate(zip(counts, ends, strict=True))
    )


def pp_rank_of(job: Job, rank: int) -> int:
    """The index of a rank on pp, the outermost axis."""
    return rank // (job.layout.world_size // job.layout.pp)


def local_stages(job: Job, pp_rank: int) -> tuple[StageSpec, ...]:
    """The stages of a pp rank, with the shapes of one tp rank."""
    return _split_stages(local_model(job), *_stage_sizes(job))[pp_rank]


@functools.lru_cache(maxsize=64)
def _split_stages(
    model: Model, counts: tuple[int, ...], stage_ranks: tuple[int, ...]
) -> tuple[tuple[StageSpec, ...], ...]:
    """The stages of every pp rank."""
    stages = _build_stages(model, counts, stage_ranks)
    return tuple(
        tuple(part for part, rank in zip(stages, stage_ranks, strict=True) if rank == pp_rank)
        for pp_rank in range(max(stage_ranks) + 1)
    )


def representative_pp_rank(job: Job, pp_rank: int) -> int:
    """The first pp rank with the same sizes and sends: most ranks of a pipeline are identical."""
    return _find_representatives(local_model(job), *_stage_sizes(job))[pp_rank]


@functools.lru_cache(maxsize=64)
def _find_representatives(
    model: Model, counts: tuple[int, ...], stage_ranks: tuple[int, ...]
) -> tuple[int, ...]:
    first: dict[Any, int] = {}
    sends, ranks = list_boundaries(stage_ranks), enumerate(_split_stages(model, counts, stage_ranks))
    keys = [(rank == 0, sends[rank], *(part.representative for part in parts)) for rank, parts in ranks]
    return tuple(first.setdefault(key, rank) for rank, key in enumerate(keys))


def local_parameters(job: Job, pp_rank: int) -> tuple[Parameter, ...]:
    """All parameters of a pp rank."""
    return with_gradients(job, tuple(p for part in local_stages(job, pp_rank) for p in part.parameters))


def local_parameter_kinds(job: Job, pp_rank: int) -> tuple[Parameter, ...]:
    """The parameters of a pp rank by kind: one entry for all identical blocks."""
    return with_gradients(job, list_parameter_kinds(local_stages(job, pp_rank)))


def list_parameter_kinds(parts: Sequence[StageSpec]) -> tuple[Parameter, ...]:
    """The parameters of some stages by kind: one entry for all identical blocks."""
    return _merge_kinds(tuple(part.representative for part in parts))


@functools.lru_cache(maxsize=4096)
def _merge_kinds(parts: tuple[StageSpec, ...]) -> tuple[Parameter, ...]:
    found: dict[tuple[str, tuple[int, ...]], Parameter] = {}
    for parameter in (p for part in parts for p in part.parameter_kinds):
        key = name_in_block(parameter.name), parameter.shape
        repeats = parameter.repeats + (found[key].repeats if key in found else 0)
        found[key] = dataclasses.replace(found.get(key, parameter), repeats=repeats)
    return tuple(found.values())


def find_tied_pp_ranks(job: Job) -> tuple[int, ...]:
    """The pp ranks with a copy of a tied embedding; empty if no copy is needed."""
    if not list_stages(job)[-1].copies_embedding:
        return ()
    stage_ranks = stage_pp_ranks(job)
    return tuple(sorted({stage_ranks[0], stage_ranks[-1]}))


def locate_parameters(job: Job) -> list[tuple[Parameter, int]]:
    """Every parameter of the whole model, with the first pp rank that has it."""
    holders: dict[str, int] = {}
    for pp_rank in range(job.layout.pp):
        for parameter in local_parameters(job, pp_rank):
            holders.setdefault(parameter.name, pp_rank)
    return [(parameter, holders[parameter.name]) for parameter in list_parameters(job.model)]
