"""Walks a training step as allocations and frees and records snapshots of the live bytes.

Every model describes its step with the same three calls: ``alloc`` a tensor, ``free`` it, and ``snapshot``
where the live bytes can be largest. Buffers that live only at one point are arguments of that snapshot. The
ledger takes the largest snapshot as the peak.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.plan.memory.snapshots import MemorySnapshot


@dataclass
class StepWalker:
    """Live bytes of one rank at the current point of the step, by kind."""

    activations: int = 0
    """Saved for backward."""
    temporary: int = 0
    gradients: int = 0
    ready_grads: int = 0
    """Gradients that are final, in backward order: their buckets may be reduced."""
    snapshots: list[MemorySnapshot] = field(default_factory=list)
    """In the order of the step."""

    def alloc(self, *, activations: int = 0, temporary: int = 0, gradients: int = 0) -> None:
        """Tensors that live from here on."""
        self.activations += activations
        self.temporary += temporary
        self.gradients += gradients

    def free(self, *, activations: int = 0, temporary: int = 0) -> None:
        """Tensors whose last use was before this point."""
        self.activations -= activations
        self.temporary -= temporary

    def snapshot(
        self,
        name: str,
        formula: str,
        *,
        activations: int = 0,
        temporary: int = 0,
        gradients: int = 0,
        at: tuple[int | None, str] = (None, ""),
    ) -> None:
        """Record the live bytes.

        Args:
            name: Name of the point.
            formula: The activations as a sum.
            activations: Tensors for backward that live only here: those of the running block.
            temporary: Buffers that live only here.
            gradients: Gradients of the running block that exist here.
            at: The running block and the phase of its backward.
        """
        self.snapshots.append(
            MemorySnapshot(
                name,
                self.activations + activations,
                self.temporary + temporary,
                self.gradients + gradients,
                formula,
                self.ready_grads,
                *at,
            )
        )
