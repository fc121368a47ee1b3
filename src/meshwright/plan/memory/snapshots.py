"""Snapshots of the live bytes of a training step, and the lines of the memory ledger."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.layout.axes import dense_reduce_axis, expert_reduce_axis, has_expert_axes, is_expert
from meshwright.layout.parameters import Parameter, count_gradient_bytes
from meshwright.plan.contract import Line
from meshwright.spec.job import Job


@dataclass(frozen=True)
class PersistentGrads:
    """Which gradients live through the whole step: those in DDP buckets, and all under accumulation."""

    dense: bool = False
    """Gradients of all parameters but routed experts."""
    experts: bool = False

    def count_bytes(self, parameters: Iterable[Parameter]) -> int:
        """Bytes of the persistent gradients of some parameters."""
        return count_gradient_bytes(
            p for p in parameters if (self.experts if is_expert(p.name) else self.dense)
        )


ALL_GRADS = PersistentGrads(dense=True, experts=True)


def find_persistent_grads(job: Job, micro_batches: int = 1) -> PersistentGrads:
    """Which gradients live through the whole step if they are not sharded."""
    if micro_batches > 1:
        return ALL_GRADS
    if job.layout.zero >= 2:
        return PersistentGrads()
    dense = dense_reduce_axis(job.layout).size > 1
    return PersistentGrads(dense, expert_reduce_axis(job.layout).size > 1 if has_expert_axes(job) else dense)


@dataclass(frozen=True)
class MemorySnapshot:
    """Live bytes at one point of the step, without parameters, optimizer state and step-long buffers."""

    name: str
    activations: int
    """Saved for backward; in a pipeline those of the running micro-batch."""
    temporary: int
    gradients: int
    formula: str
    """The activations as a sum."""
    ready_grads: int = 0
    """Gradients that are final, in backward order: their buckets may be reduced."""
    layer: int | None = None
    """The running block; None outside of blocks."""
    phase: str = ""
    """Phase of the backward pass: ``block``, ``attention``, ``recompute``, ``experts``, ``experts unshard``,
    ``unshard``, ``last`` (gradient), ``reduced``, ``root`` (outside of blocks); empty in forward."""
    gathered: int = 0
    """ZeRO-2 and 3: all-gathered parameters; in a pipeline with the inputs of reduce-scatters."""
    gathered_formula: str = "gathered by FSDP"
    reduce_inputs: int = 0
    """ZeRO-2 and 3: inputs of reduce-scatters."""
    in_flight: int = 0
    """Pipeline: activations of the other micro-batches."""
    in_flight_formula: str = "none"
    send_buffers: int = 0
    """Pipeline: tensors sent, passed to a stage of the same rank, or being received."""
    send_formula: str = "none"

    @property
    def backward(self) -> bool:
        """Whether it is in backward."""
        return bool(self.phase)

    @property
    def bytes(self) -> int:
        """All of it."""
        live = self.activations + self.temporary + self.gradients + self.gathered + self.reduce_inputs
        return live + self.in_flight + self.send_buffers


@dataclass(frozen=True)
class StepMemory:
    """Memory of one micro-batch of a model in a step."""

    snapshots: tuple[MemorySnapshot, ...]
    """In the order of the step; of a pipeline or FSDP the peak alone."""
    buffers: tuple[Line, ...]
    """Buffers that live through the whole step: batch, tables, masks."""
    activation_bytes: int
    """Saved for backward; of a pipeline the largest stage."""
    touched_bytes: int
    """The same without activation checkpointing, all stages of the rank: for memory traffic."""
