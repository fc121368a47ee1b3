"""The predicted step of one settled job, part by part.

Decoders have the engine's estimate of their layout (``plan.time.engine``) on every device; only the bubble,
uneven stages and transfers of a pipeline come from its walked schedule. ResNets have a formula of their own
(``plan.time.resnet``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.plan.contract import CollectiveTraffic, PipelineTime
from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.time.engine import StepEstimate, estimate_step
from meshwright.plan.time.pipeline import plan_pipeline
from meshwright.plan.time.resnet import estimate_resnet_step
from meshwright.plan.time.stages import stage_times
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest rank."""

    parts: dict[str, float]
    """What the step consists of, in seconds that add up to it; parts that are zero are left out."""
    hidden: dict[str, float] = field(default_factory=dict)
    """Communication that is hidden behind compute."""
    pipeline: PipelineTime | None = None
    """The walked schedule; None without a pipeline, and where the schedule is too large to generate."""

    @property
    def total_s(self) -> float:
        """The whole step."""
        return sum(self.parts.values())


def predict_step(
    job: Job, micro_batches: int, touched_bytes: int = 0, traffic: Sequence[CollectiveTraffic] = ()
) -> StepTime:
    """The step of a rank; of a pipeline's ranks, that of the slowest.

    Args:
        job: With the layout settled, its micro-batch included.
        micro_batches: Of one step.
        touched_bytes: Activations that one micro-batch makes. Read for ResNets; the engine counts its own.
        traffic: The collectives of the layout. Read for ResNets; the engine counts its own.
    """
    if not isinstance(job.model, DecoderModel):
        parts, hidden = estimate_resnet_step(job, micro_batches, touched_bytes, traffic)
        return StepTime(_without_zeros(parts), _without_zeros(hidden))
    layout = job.layout
    samples = micro_batches * (layout.micro_batch or 1) * layout.data_degree
    workload = dataclasses.replace(Workload.of(job), global_batch=samples)
    return predict_layout(job, micro_batches, estimate_step(workload, Grid.of([layout])), 0)


def predict_layout(job: Job, micro_batches: int, step: StepEstimate, place: int) -> StepTime:
    """The step of one layout of an estimate; the schedule of a pipeline is walked.

    Args:
        job: With this layout.
        micro_batches: Of one step.
        step: The estimate of a grid of layouts.
        place: That of the layout in it.
    """
    parts = {name: float(values[place]) for name, values in step.parts.items()}
    hidden = _without_zeros({name: float(values[place]) for name, values in step.hidden.items()})
    pipeline = None
    if job.layout.pp > 1:
        times = stage_times(job, micro_batches, step, place)
        pipeline = plan_pipeline(job, micro_batches, times, float(step.send_s[place]))
    if pipeline is not None:
        parts["uneven stages"] = max(0.0, pipeline.work_s - micro_batches * float(step.passes.total[place]))
        parts["bubble"], parts["pipeline transfers"] = pipeline.bubble_s, pipeline.exposed_send_s
    return StepTime(_without_zeros(parts), hidden, pipeline)


def _without_zeros(parts: dict[str, float]) -> dict[str, float]:
    return {name: seconds for name, seconds in parts.items() if seconds}
