"""The parts of each pipeline stage's passes: compute, recompute, and communication by axis.

The times are those of the plan: the passes of a stage (``plan.time.stages``), divided by the parts that
``plan.time.engine`` added up. A step without a pipeline is one stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.layout.pipeline_schedules import stage_pp_ranks
from meshwright.layout.placement import RANK_ORDER, Slots
from meshwright.plan.contract import PipelineTime
from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.profiles import PROFILES
from meshwright.plan.time.engine import StepEstimate, estimate_step
from meshwright.plan.time.resnet import BACKWARD_SHARE
from meshwright.plan.time.spans import find_spans, needs_spans
from meshwright.plan.time.stages import Cost, split_layers
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


@dataclass(frozen=True)
class PassTime:
    """One pass of one micro-batch through a stage, in seconds."""

    total_s: float
    recompute_s: float
    """Activation checkpointing."""
    exposed_s: Mapping[str, float]
    """Communication that compute waits for, by axis."""
    hidden_s: Mapping[str, float]
    """Communication that overlaps with the pass, by axis."""

    @property
    def compute_s(self) -> float:
        """The rest."""
        return max(0.0, self.total_s - self.recompute_s - sum(self.exposed_s.values()))


@dataclass(frozen=True)
class StagePasses:
    """The passes of one stage."""

    forward: PassTime
    backward_input: PassTime
    """The whole backward pass of a ResNet."""
    backward_weight: PassTime


@dataclass(frozen=True)
class StepParts:
    """The passes of every stage, and the overlapped all-gather of a step."""

    stages: tuple[StagePasses, ...]
    hidden_gather_s: float
    """All-gather of ZeRO-1 and 2, overlapped with the first forward pass."""


def find_step_parts(
    job: Job,
    micro_batches: int,
    compute_s: float,
    pipeline: PipelineTime | None,
    slots: Slots = RANK_ORDER,
) -> StepParts:
    """The parts of a planned step.

    Args:
        job: With a complete layout.
        micro_batches: Micro-batches of the step.
        compute_s: The plan's compute; used for ResNets only.
        pipeline: The plan's simulated schedule; None without a pipeline.
        slots: The slot of each rank.
    """
    if not isinstance(job.model, DecoderModel):
        each = compute_s / micro_batches
        forward, backward = _plain(each * (1 - BACKWARD_SHARE)), _plain(each * BACKWARD_SHARE)
        return StepParts((StagePasses(forward, backward, _plain(0.0)),), 0.0)
    layout = job.layout
    samples = micro_batches * (layout.micro_batch or 1) * layout.data_degree
    workload = dataclasses.replace(Workload.of(job), global_batch=samples)
    spans = find_spans(job, slots or range(layout.world_size)) if needs_spans(job, slots) else None
    step = estimate_step(workload, Grid.of([layout]), spans=spans)
    totals = _totals(step, pipeline)
    stages = [
        _divide(step, row, total) for row, total in zip(_stage_weights(job, totals), totals, strict=True)
    ]
    return StepParts(tuple(stages), float(step.hidden_gather_s[0]))


def _plain(seconds: float) -> PassTime:
    return PassTime(seconds, 0.0, {}, {})


def _totals(step: StepEstimate, pipeline: PipelineTime | None) -> list[Cost]:
    """Seconds of the passes of each stage, as in the plan."""
    if pipeline is None:
        return [Cost.of(step.passes, 0)]
    rows = zip(pipeline.forward_s, pipeline.backward_input_s, pipeline.backward_weight_s, strict=True)
    return [Cost(*row) for row in rows]


def _stage_weights(job: Job, totals: list[Cost]) -> list[tuple[float, float, float]]:
    """Number of blocks, embeddings and heads in each stage; fractions where stages are averages."""
    assert isinstance(job.model, DecoderModel), "ResNets have no stages"
    layout, layers = job.layout, job.model.num_layers
    if len(totals) == 1:  # also where the schedule is too large: an average rank
        return [(layers / layout.pp, 1 / layout.pp, 1 / layout.pp)]
    if layout.stage_layers is None and not PROFILES[job.train.runtime].time.balances_stages_by_time:
        mean = layout.pp / len(totals)
        scale = [mean * one.total_s / totals[0].total_s for one in totals]
        return [(share * layers / layout.pp, share / layout.pp, share / layout.pp) for share in scale]
    assigned = layout.stage_layers or split_layers(job)
    assert assigned is not None, "a pipeline of a decoder has layers for each stage"
    assert len(assigned) == len(stage_pp_ranks(job)), "one number of layers per stage"
    last = len(assigned) - 1
    return [(float(n), float(stage == 0), float(stage == last)) for stage, n in enumerate(assigned)]


def _divide(step: StepEstimate, weights: tuple[float, float, float], total: Cost) -> StagePasses:
    blocks, embeddings, heads = weights
    ends = ((embeddings, step.embedding_tp), (heads, step.head_tp))
    parts = step.block_parts
    exposed, hidden = (
        {axis: blocks * Cost.of(passes, 0).passes for axis, passes in side.items()}
        for side in (parts.exposed, parts.hidden)
    )
    exposed["tp"] = exposed["tp"] + sum(count * Cost.of(passes, 0).passes for count, passes in ends)

    def one(index: int, seconds: float, recompute_s: float = 0.0) -> PassTime:
        found = [
            {axis: float(row[index]) for axis, row in side.items() if row[index] > 0}
            for side in (exposed, hidden)
        ]
        return PassTime(seconds, recompute_s, found[0], found[1])

    recompute_s = blocks * float(parts.recompute[0])
    return StagePasses(
        one(0, total.forward_s),
        one(1, total.backward_input_s, recompute_s),
        one(2, total.backward_weight_s),
    )
