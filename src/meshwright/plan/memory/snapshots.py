"""The moments of a step at which a rank can hold most, as the models' ledgers describe them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.layout.axes import (
    dense_reduce_axis,
    expert_reduce_axis,
    has_expert_axes,
    is_expert,
)
from meshwright.layout.parameters import (
    Parameter,
    count_gradient_bytes,
)
from meshwright.plan.contract import Line
from meshwright.spec.job import Job


@dataclass(frozen=True)
class PersistentGrads:
    """Which gradients live through the whole step: those in buckets, and all where micro-batches add up."""

    dense: bool = False
    """Those of everything but routed experts."""
    experts: bool = False

    def count_bytes(self, parameters: Iterable[Parameter]) -> int:
        """Of some parameters those that live."""
        return count_gradient_bytes(
            p for p in parameters if (self.experts if is_expert(p.name) else self.dense)
        )


ALL_GRADS = PersistentGrads(dense=True, experts=True)


@dataclass(frozen=True)
class MemorySnapshot:
    """A moment of the step and what lives there beside parameters, optimizer state and what always lives."""

    name: str
    activations: int
    temporary: int
    gradients: int
    formula: str
    """The activations as a sum that can be checked."""
    complete_bytes: int = 0
    """Gradients that are complete by then, in the order of the backward pass; their buckets may be sent."""
    layer: int | None = None
    """The block at work; None where it is none."""
    part: str = ""
    """Of the backward pass: ``block``, ``attention``, ``again``, ``reduced``, ``around``; else empty."""

    @property
    def backward(self) -> bool:
        """Whether it is in the backward pass."""
        return bool(self.part)

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.activations + self.temporary + self.gradients


@dataclass(frozen=True)
class StepMemory:
    """What one micro-batch of a model brings to life in a step."""

    snapshots: tuple[MemorySnapshot, ...]
    """In the order of the step."""
    buffers: tuple[Line, ...]
    """What lives from the first moment to the last: the batch, tables, masks."""
    activation_bytes: int
    """Alive between forward and backward because the backward pass needs it."""
    touched_bytes: int
    """What would be kept without recomputation: a measure of the traffic that is not matrix products."""


def find_persistent_grads(job: Job, micro_batches: int = 1) -> PersistentGrads:
    """Which gradients live through the whole step where they are not cut."""
    if micro_batches > 1:
        return ALL_GRADS
    if job.layout.zero >= 2:
        return PersistentGrads()
    dense = dense_reduce_axis(job.layout).size > 1
    return PersistentGrads(dense, expert_reduce_axis(job.layout).size > 1 if has_expert_axes(job) else dense)
