"""Collectives over all ranks: the control all-reduce of a step, and the comparison of replicas."""

from __future__ import annotations

from meshwright.layout.axes import is_sharded
from meshwright.layout.replicas import CHECKSUM_BYTES, has_replicas, list_replica_axes
from meshwright.plan.contract import CollectiveTraffic
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

FLOAT64_BYTES = 8
CONTROL_STEP_VALUES = 4
"""Loss sum, target tokens, bad step, stop request: reduced once per step."""
CONTROL_NOISE_VALUES = 2
"""Squared norm and number of shards, for the gradient noise scale; only in jobs that measure it."""
CONTROL_SAVE_VALUES = 1
"""Save request of rank 0: every rank writes its part of a checkpoint."""
CONTROL_FOLLOW_VALUES = 2
"""Rank 0's name of data that have grown, and the ranks that have opened them; with ``data.follow``."""
CONTROL_NORM_VALUES = 1
"""Squared norm of a rank's gradient shard: a separate all-reduce."""
CONTROL_EVAL_VALUES = 2
"""Loss sum and target tokens of an evaluation."""


def predict_control(job: Job) -> list[CollectiveTraffic]:
    """The control all-reduces over all ranks: loss, requests, gradient norm, expert load."""
    layout, values, calls = job.layout, CONTROL_STEP_VALUES, 1
    if job.train.noise_scale_every:
        values += CONTROL_NOISE_VALUES
    if layout.world_size > 1:
        values += CONTROL_SAVE_VALUES
    if job.data.follow:
        values += CONTROL_FOLLOW_VALUES
    if is_sharded(job):
        values, calls = values + CONTROL_NORM_VALUES, calls + 1
    if isinstance(job.model, DecoderModel) and job.model.load_size:
        values, calls = values + job.model.load_size, calls + 1
    world, evaluation = layout.world_size, CONTROL_EVAL_VALUES * FLOAT64_BYTES
    return [
        CollectiveTraffic("control", "all_reduce", "step", world, calls, values * FLOAT64_BYTES),
        CollectiveTraffic("control", "all_reduce", "eval", world, 1, evaluation),
        *_predict_replica_check(job),
    ]


def _predict_replica_check(job: Job) -> list[CollectiveTraffic]:
    """The all-gather of checksums of the parameters: one per kind of replicas, from every rank."""
    if not job.train.replica_check_every or not has_replicas(job):
        return []
    world = job.layout.world_size
    gathered = world * len(list_replica_axes(job)) * CHECKSUM_BYTES
    return [CollectiveTraffic("control", "all_gather", "replica_check", world, 1, gathered)]
