"""What leaves the device: which state lies on the host, and the buffers through which it is streamed.

``offload = "optimizer"``: moments lie on the host. In the update they come to the device bucket by bucket,
are updated there and go back: a slot for what comes, one at work, one for what goes. ``"all"`` (ZeRO-2 and
3): parameters, gradients and moments lie on the host, which takes the update too; nothing is streamed for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.plan.optimizer import STEP_COUNT, rule_of, state_keys
from meshwright.plan.parts import held_buckets, held_parameters, pipeline_rank
from meshwright.plan.shapes import FLOAT32_BYTES, Parameter
from meshwright.plan.sharding import count_own
from meshwright.spec.job import Job

SLOTS = 3
"""Buckets of state on the device at once: arriving, at work, leaving."""
OFFLOADED = {
    "none": (),
    "optimizer": ("optimizer",),
    "all": ("parameters", "gradients", "optimizer"),
}
"""Kinds of state that lie on the host."""


def offloaded_state(job: Job, state: dict[str, int]) -> dict[str, int]:
    """The part of a rank's state that lies on the host, by kind."""
    away = OFFLOADED[job.layout.offload]
    return {kind: size if kind in away else 0 for kind, size in state.items()}


def list_state_buckets(job: Job, rank: int = 0) -> list[list[str]]:
    """Names of parameters whose state is streamed together: those of a bucket of gradients."""
    return held_buckets(job, pipeline_rank(job, rank))


def slot_sizes(buckets: Sequence[int]) -> list[int]:
    """Buckets take the slots in turn; each slot is as large as the largest of its own."""
    return [max(buckets[place::SLOTS]) for place in range(min(SLOTS, len(buckets)))]


def streaming_bytes(job: Job, rank: int = 0) -> int:
    """Device memory for what is streamed; none where nothing is, or the host takes the update."""
    if job.layout.offload != "optimizer":
        return 0
    parameters = {p.name: p for p in held_parameters(job, pipeline_rank(job, rank))}
    buckets = [
        sum(_state_bytes(parameters[name], job, rank) for name in names)
        for names in list_state_buckets(job, rank)
    ]
    return sum(slot_sizes(buckets))


def _state_bytes(parameter: Parameter, job: Job, rank: int) -> int:
    own = count_own(job, parameter, rank)
    keys = state_keys(rule_of(parameter.name, len(parameter.shape), job.train), job.train)
    return sum(1 if key == STEP_COUNT else own for key in keys) * FLOAT32_BYTES
