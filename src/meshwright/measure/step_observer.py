"""Whoever looks on during one step: the audit, or a proof."""

from __future__ import annotations

from typing import Protocol


class StepObserver(Protocol):
    """Told where a step is."""

    def before_forward(self, micro_batch: int) -> None:
        """A forward pass of a micro-batch begins, of the whole model or of a stage."""

    def after_forward(self, border_bytes: int = 0) -> None:
        """It is over.

        Args:
            border_bytes: Of a stage: what it was given and keeps, less what it has made and hands on.
        """

    def before_backward(self, micro_batch: int) -> None:
        """The backward pass of a micro-batch begins; what it computes again is that micro-batch's, too."""

    def after_backward(self) -> None:
        """The gradients of the step are complete, and nothing is clipped or updated yet."""
