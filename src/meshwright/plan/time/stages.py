"""How long each stage of a pipeline works on a micro-batch, and which layers it gets because of it.

All costs are the engine's (``plan.time.engine``): an average block with the communication that delays it, the
embedding, and the head with the loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.layout.pipeline_schedules import stage_pp_ranks
from meshwright.plan.estimate.grid import Floats, Grid
from meshwright.plan.estimate.profiles import PROFILES
from meshwright.plan.estimate.workload import Workload
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
    """Seconds of one micro-batch."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float

    @classmethod
    def of(cls, passes: Passes, place: int) -> Cost:
        """That of one layout."""
        return cls(
            float(passes.forward[place]),
            float(passes.backward_input[place]),
            float(passes.backward_weight[place]),
        )

    @property
    def total_s(self) -> float:
        """Of the whole micro-batch."""
        return self.forward_s + self.backward_input_s + self.backward_weight_s

    @property
    def passes(self) -> Floats:
        """The three as an array."""
        return np.array([self.forward_s, self.backward_input_s, self.backward_weight_s])


@dataclass(frozen=True)
class PartCosts:
    """Of the three kinds of work in a stage, on one rank."""

    block: Cost
    embedding: Cost
    head: Cost

    @classmethod
    def of(cls, step: StepEstimate, place: int) -> PartCosts:
        """Those of one layout of an estimate."""
        return cls(*(Cost.of(passes, place) for passes in (step.block, step.embedding, step.head)))

    @property
    def embedding_blocks(self) -> float:
        """Cost of the embedding, in blocks."""
        return self.embedding.total_s / self.block.total_s

    @property
    def head_blocks(self) -> float:
        """Cost of the head, in blocks."""
        return self.head.total_s / self.block.total_s


def part_costs(job: Job) -> PartCosts:
    """What blocks and ends cost on one rank of a job whose micro-batch is settled."""
    return PartCosts.of(estimate_step(Workload.of(job), Grid.of([job.layout])), 0)


def split_layers(job: Job, costs: PartCosts | None = None) -> tuple[int, ...] | None:
    """Layers of each stage, so that the slowest rank is as fast as it can be; None without a pipeline.

    Args:
        job: With its micro-batch settled.
        costs: Where they are known already.
    """
    if job.layout.pp == 1 or not isinstance(job.model, DecoderModel):
        return None
    costs = costs or part_costs(job)
    return assign_layers(job.model.num_layers, stage_pp_ranks(job), costs.embedding_blocks, costs.head_blocks)


def assign_stages(job: Job, layouts: Sequence[Layout], step: StepEstimate) -> list[Layout]:
    """Layouts with the layers of their pipeline stages, as :func:`split_layers` assigns them.

    Args:
        job: Of a decoder.
        layouts: With their micro-batches settled.
        step: Their estimate.
    """
    found = []
    for place, layout in enumerate(layouts):
        layers = split_layers(with_layout(job, layout), PartCosts.of(step, place))
        found.append(dataclasses.replace(layout, stage_layers=layers))
    return found


def stage_times(job: Job, micro_batches: int, step: StepEstimate, place: int) -> StageTimes:
    """Seconds of one micro-batch in each stage.

    Stages have the layers of the layout, else those that :func:`split_layers` assigns. Other runtimes do not
    balance their stages: there all stages are alike, and the last one is slower by its excess.

    Args:
        job: With its layout settled; its stages' layers may be open.
        micro_batches: Of one step.
        step: The estimate of a grid of layouts.
        place: That of the job's layout in it.
    """
    costs, stage_ranks = PartCosts.of(step, place), stage_pp_ranks(job)
    if job.layout.stage_layers is None and not PROFILES[job.train.runtime].time.balanced_stages:
        mean = Cost.of(step.passes, place)
        excess = float(step.parts["uneven stages"][place]) / micro_batches / mean.total_s
        times = np.outer(mean.passes, np.full(len(stage_ranks), job.layout.pp / len(stage_ranks)))
        times[:, -1] += mean.passes * excess
        return StageTimes(*times)
    layers = job.layout.stage_layers or split_layers(job, costs)
    assert layers is not None, "only pipelines of decoders have stages"
    times = np.outer(costs.block.passes, layers)
    times[:, 0] += costs.embedding.passes
    times[:, -1] += costs.head.passes
    return StageTimes(*times)
