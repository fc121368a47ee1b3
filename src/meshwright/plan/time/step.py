"""The predicted step of one job with a complete layout, by parts.

Decoders use the estimate of ``plan.time.engine``; the bubble, uneven stages and transfers of a pipeline
come from its simulated schedule. ResNets have their own formula (``plan.time.resnet``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwright.layout.placement import RANK_ORDER, Slots
from meshwright.plan.contract import CollectiveTraffic, PipelineTime
from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.time.engine import StepEstimate, estimate_step
from meshwright.plan.time.pipeline import plan_pipeline
from meshwright.plan.time.rates import ranks_per_core
from meshwright.plan.time.resnet import estimate_resnet_step
from meshwright.plan.time.spans import find_spans, needs_spans
from meshwright.plan.time.stages import stage_times
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest rank."""

    parts: dict[str, float]
    """The parts add up to the step; zeros are left out."""
    hidden: dict[str, float] = field(default_factory=dict)
    """Communication overlapped with compute."""
    pipeline: PipelineTime | None = None
    """The simulated schedule; None without a pipeline, and if the schedule is too large to generate."""
    launch_wait_s: float = 0.0
    """Part of the compute in which devices wait for the CPU's kernel launches, on an average rank."""

    @property
    def total_s(self) -> float:
        """The whole step."""
        return sum(self.parts.values())


def predict_step(
    job: Job,
    micro_batches: int,
    touched_bytes: int = 0,
    traffic: Sequence[CollectiveTraffic] = (),
    slots: Slots = RANK_ORDER,
) -> StepTime:
    """The step of the slowest rank.

    Args:
        job: With a complete layout.
        micro_batches: Micro-batches of one step.
        touched_bytes: Activation bytes of one micro-batch; used for ResNets only.
        traffic: The collectives of the layout; used for ResNets only.
        slots: The slot of each rank.
    """
    if not isinstance(job.model, DecoderModel):
        parts, hidden = estimate_resnet_step(job, micro_batches, touched_bytes, traffic, slots)
        shared = float(ranks_per_core(job.cluster, np.array([job.layout.world_size]))[0])
        parts, hidden = ({name: s * shared for name, s in times.items()} for times in (parts, hidden))
        return StepTime(_without_zeros(parts), _without_zeros(hidden))
    layout = job.layout
    samples = micro_batches * (layout.micro_batch or 1) * layout.data_degree
    workload = dataclasses.replace(Workload.of(job), global_batch=samples)
    spans = find_spans(job, slots or range(layout.world_size)) if needs_spans(job, slots) else None
    return predict_layout(job, micro_batches, estimate_step(workload, Grid.of([layout]), spans=spans), 0)


def predict_layout(job: Job, micro_batches: int, step: StepEstimate, index: int) -> StepTime:
    """The step of one layout of an estimate, with a simulated pipeline schedule.

    Args:
        job: With this layout.
        micro_batches: Micro-batches of one step.
        step: The estimate of a grid of layouts.
        index: Index of the layout in the grid.
    """
    parts = {name: float(values[index]) for name, values in step.parts.items()}
    hidden = _without_zeros({name: float(values[index]) for name, values in step.hidden.items()})
    pipeline = None
    if job.layout.pp > 1:
        times = stage_times(job, micro_batches, step, index)
        pipeline = plan_pipeline(job, micro_batches, times, float(step.send_s[index]))
    if pipeline is not None:
        parts["uneven stages"] = max(0.0, pipeline.work_s - micro_batches * float(step.passes.total[index]))
        parts["bubble"], parts["pipeline transfers"] = pipeline.bubble_s, pipeline.exposed_send_s
    return StepTime(_without_zeros(parts), hidden, pipeline, float(step.launch_wait_s[index]))


def _without_zeros(parts: dict[str, float]) -> dict[str, float]:
    return {name: seconds for name, seconds in parts.items() if seconds}
