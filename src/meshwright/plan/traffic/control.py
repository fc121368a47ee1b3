"""The control all-reduce: loss, stop and save requests, gradient norm and expert load, over all ranks."""

from __future__ import annotations

from meshwright.layout.axes import is_sharded
from meshwright.plan.contract import CollectiveTraffic
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

FLOAT64_BYTES = 8
CONTROL_STEP_VALUES = 3
"""Loss sum, target tokens, wish to stop: reduced once a step."""
CONTROL_NOISE_VALUES = 2
"""Squared norm and number of parts for the gradient noise scale: in every step of a job that measures it."""
CONTROL_SAVE_VALUES = 1
"""Rank 0's wish to save, where all ranks must take part."""
CONTROL_NORM_VALUES = 1
"""Squared norm of a rank's shard of the gradient, where that is cut: a reduction of its own."""
CONTROL_EVAL_VALUES = 2
"""Loss sum and target tokens of an evaluation."""


def needs_grad_norm(job: Job) -> bool:
    """Whether the norm of the gradient is wanted in every step: to clip, or to find fp16's overflows."""
    return job.train.clip > 0 or job.train.precision == "fp16"


def predict_control(job: Job) -> list[CollectiveTraffic]:
    """The small reductions of loss, wishes, norm and load of experts over all ranks."""
    layout, values, calls = job.layout, CONTROL_STEP_VALUES, 1
    if job.train.noise_scale_every:
        values += CONTROL_NOISE_VALUES
    if is_sharded(job):  # all take part in norms and checkpoints
        values += CONTROL_SAVE_VALUES
        if needs_grad_norm(job):
            values, calls = values + CONTROL_NORM_VALUES, calls + 1
    if isinstance(job.model, DecoderModel) and job.model.load_size:
        values, calls = values + job.model.load_size, calls + 1
    world, evaluation = layout.world_size, CONTROL_EVAL_VALUES * FLOAT64_BYTES
    return [
        CollectiveTraffic("control", "all_reduce", "step", world, calls, values * FLOAT64_BYTES),
        CollectiveTraffic("control", "all_reduce", "eval", world, 1, evaluation),
    ]
