"""Traffic of pipeline parallelism: sends between stages.

With N tokens of a micro-batch on a rank (N / tp with sequence parallelism) and D hidden, a stage sends N x D
elements of the residual stream to the next stage in every forward pass, and as many of its gradient to the
previous stage in every backward pass. Stages on the same rank need no send. Sends are counted at the sender;
receives are not counted.

A tied head on another rank than the embedding is a copy: their gradients are all-reduced once per step.
"""

from __future__ import annotations

from meshwright.layout.fsdp_groups import local_count
from meshwright.layout.parameters import FLOAT32_BYTES, residual_bytes
from meshwright.layout.pipeline_schedules import boundaries_of
from meshwright.layout.stages import (
    TIED_AXIS,
    TIED_NAME,
    find_tied_pp_ranks,
    local_parameter_kinds,
)
from meshwright.layout.tensor_parallel import count_tokens
from meshwright.plan.contract import CollectiveTraffic
from meshwright.spec.job import Job
from meshwright.spec.micro_batches import count_micro_batches
from meshwright.spec.model import DecoderModel


def boundary_bytes(job: Job) -> int:
    """Bytes sent from one stage to the next for one micro-batch."""
    assert isinstance(job.model, DecoderModel), "the legality rules allow it for decoders only"
    layout = job.layout
    tokens = count_tokens(job)
    resident = tokens // layout.tp if layout.sequence_parallel else tokens
    return resident * job.model.hidden_size * residual_bytes(job.train)


def predict_pipeline(job: Job, pp_rank: int) -> list[CollectiveTraffic]:
    """Sends of a rank over ``pp``."""
    forward, backward, targets = boundaries_of(job, pp_rank)
    steps = count_micro_batches(job) * (forward + backward)
    evaluations = count_micro_batches(job, job.train.eval_samples) * forward
    ranks, size = job.layout.pp, boundary_bytes(job)
    return [
        # One number opens the connection to each target rank.
        CollectiveTraffic("pp", "send", "setup", ranks, targets, targets * FLOAT32_BYTES),
        CollectiveTraffic("pp", "send", "step", ranks, steps, steps * size),
        CollectiveTraffic("pp", "send", "eval", ranks, evaluations, evaluations * size),
        *_tied_traffic(job, pp_rank),
    ]


def _tied_traffic(job: Job, pp_rank: int) -> list[CollectiveTraffic]:
    """The gradient all-reduce of a tied embedding that two pipeline ranks hold."""
    if len(find_tied_pp_ranks(job)) < 2:
        return []
    return [
        CollectiveTraffic(TIED_AXIS, "all_reduce", "step", 2, 1, local_count(job, p) * FLOAT32_BYTES)
        for p in local_parameter_kinds(job, pp_rank)
        if p.name == TIED_NAME
    ]
