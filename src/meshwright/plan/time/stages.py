"""Time of each pipeline stage per micro-batch, and the layers of each stage.

All costs come from ``plan.time.engine``: an average block with its exposed communication, the embedding,
and the head with the loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.layout.pipeline_schedules import stage_pp_ranks
from meshwright.plan.estimate.grid import Floats, Grid
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.profiles import PROFILES
from meshwright.plan.time.block import Passes
from meshwright.plan.time.engine import StepEstimate, estimate_step
from meshwright.plan.time.stage_layers import assign_layers
from meshwright.schedule.pipeline.walk import StageTimes
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.legality.table import with_layout
from meshwright.spec.model import DecoderModel


@dataclass(frozen=True)
class Cost:
    """Seconds per micro-batch."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float

    @classmethod
    def of(cls, passes: Passes, index: int) -> Cost:
        """The cost of one layout."""
        return cls(
            float(passes.forward[index]),
            float(passes.backward_input[index]),
            float(passes.backward_weight[index]),
        )

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_input_s + self.backward_weight_s

    @property
    def passes(self) -> Floats:
        """The three as an array."""
        return np.array([self.forward_s, self.backward_input_s, self.backward_weight_s])


@dataclass(frozen=True)
class PartCosts:
    """Costs of a block, the embedding and the head on one rank."""

    block: Cost
    embedding: Cost
    head: Cost

    @classmethod
    def of(cls, step: StepEstimate, index: int) -> PartCosts:
        """The costs of one layout of an estimate."""
        return cls(*(Cost.of(passes, index) for passes in (step.block, step.embedding, step.head)))

    @property
    def embedding_blocks(self) -> float:
        """Cost of the embedding, in blocks."""
        return self.embedding.total_s / self.block.total_s

    @property
    def head_blocks(self) -> float:
        """Cost of the head, in blocks."""
        return self.head.total_s / self.block.total_s


def part_costs(job: Job) -> PartCosts:
    """Costs of block, embedding and head on one rank of a job with a micro-batch."""
    return PartCosts.of(estimate_step(Workload.of(job), Grid.of([job.layout])), 0)


def split_layers(job: Job, costs: PartCosts | None = None) -> tuple[int, ...] | None:
    """Layers of each stage, so that the slowest rank is as fast as possible; None without a pipeline.

    Args:
        job: With a micro-batch.
        costs: If known already.
    """
    if job.layout.pp == 1 or not isinstance(job.model, DecoderModel):
        return None
    costs = costs or part_costs(job)
    return assign_layers(job.model.num_layers, stage_pp_ranks(job), costs.embedding_blocks, costs.head_blocks)


def assign_stages(job: Job, layouts: Sequence[Layout], step: StepEstimate) -> list[Layout]:
    """The layouts with ``stage_layers`` of :func:`split_layers`.

    Args:
        job: With a decoder.
        layouts: With micro-batches.
        step: Their estimate.
    """
    found = []
    for index, layout in enumerate(layouts):
        layers = split_layers(with_layout(job, layout), PartCosts.of(step, index))
        found.append(dataclasses.replace(layout, stage_layers=layers))
    return found


def stage_times(job: Job, micro_batches: int, step: StepEstimate, index: int) -> StageTimes:
    """Seconds of one micro-batch in each stage.

    Stages have the layers of the layout, else those of :func:`split_layers`. Other runtimes do not balance
    their stages: there all stages are equal, except for the extra cost of the last one.

    Args:
        job: With a complete layout; ``stage_layers`` may be open.
        micro_batches: Micro-batches of one step.
        step: The estimate of a grid of layouts.
        index: Index of the job's layout in the grid.
    """
    costs, stage_ranks = PartCosts.of(step, index), stage_pp_ranks(job)
    if job.layout.stage_layers is None and not PROFILES[job.train.runtime].time.balances_stages_by_time:
        mean = Cost.of(step.passes, index)
        excess = float(step.parts["uneven stages"][index]) / micro_batches / mean.total_s
        times = np.outer(mean.passes, np.full(len(stage_ranks), job.layout.pp / len(stage_ranks)))
        times[:, -1] += mean.passes * excess
        return StageTimes(*times)
    layers = job.layout.stage_layers or split_layers(job, costs)
    assert layers is not None, "only pipelines of decoders have stages"
    times = np.outer(costs.block.passes, layers)
    times[:, 0] += costs.embedding.passes
    times[:, -1] += costs.head.passes
    return StageTimes(*times)
