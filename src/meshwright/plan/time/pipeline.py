"""When the stages of a pipeline work and when they wait: the schedule walked with predicted times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.plan.parts import schedule_of
from meshwright.plan.pipeline_traffic import handed_bytes
from meshwright.plan.time.stages import stage_times
from meshwright.schedule.actions import PipelineSchedule
from meshwright.schedule.walk import StageTimes, Walk, walk_schedule
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job


@dataclass(frozen=True)
class PipelineTime:
    """What is planned of a pipeline's step; times are of one micro-batch."""

    bubble: float
    """The idle share of all ranks' time, from the first action to the last."""
    makespan_s: float
    """From the first action of a step to the last."""
    work_s: float
    """Of the busiest rank."""
    transfer_s: float
    """From one stage to the next where they are on different ranks."""
    forward_s: tuple[float, ...]
    """Of each stage."""
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]

    @property
    def bubble_s(self) -> float:
        """How much longer the step is than its busiest rank's work; waiting for transfers is in it."""
        return self.makespan_s - self.work_s

    @property
    def stage_times(self) -> StageTimes:
        """As the walker takes them."""
        return StageTimes(self.forward_s, self.backward_input_s, self.backward_weight_s)


def link(cluster: Cluster, ranks: int) -> tuple[float, float]:
    """Bytes a second and latency between so many neighbouring ranks: of the network if they fill a node."""
    crossing = ranks > cluster.devices_per_node
    bandwidth = (cluster.nic_bytes_per_s if crossing else None) or cluster.link_bytes_per_s
    latency = (cluster.nic_latency_s if crossing else None) or cluster.link_latency_s
    return bandwidth, latency


def walk_pipeline(job: Job, micro_batches: int, planned: PipelineTime) -> tuple[PipelineSchedule, Walk]:
    """The schedule of a step, and when each of its actions is planned."""
    schedule = schedule_of(job, micro_batches)
    return schedule, walk_schedule(schedule, planned.stage_times, planned.transfer_s)


def plan_pipeline(job: Job, micro_batches: int, model_s: float | None = None) -> PipelineTime:
    """Walk the schedule of a settled job.

    Args:
        job: With its layout settled.
        micro_batches: Of a step.
        model_s: What one micro-batch takes in all stages together, where another estimate says so; the
            stages then keep their shares.
    """
    times = stage_times(job)
    rows = [_listed(t) for t in (times.forward_s, times.backward_input_s, times.backward_weight_s)]
    scale = model_s / sum(map(sum, rows)) if model_s else 1.0
    forward, inputs, weights = (tuple(scale * seconds for seconds in row) for row in rows)
    bandwidth, latency = link(job.cluster, job.layout.world_size)
    transfer = handed_bytes(job) / bandwidth + latency
    walk = walk_schedule(schedule_of(job, micro_batches), StageTimes(forward, inputs, weights), transfer)
    return PipelineTime(walk.bubble, walk.makespan_s, max(walk.work_s), transfer, forward, inputs, weights)


def _listed(times: object) -> Sequence[float]:
    return [float(seconds) for seconds in np.atleast_1d(np.asarray(times, dtype=float))]
