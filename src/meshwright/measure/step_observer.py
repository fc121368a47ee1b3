"""Interface of what observes one step: the audit or a proof."""

from __future__ import annotations

from typing import Protocol


class StepObserver(Protocol):
    """Is called at fixed points of a step."""

    def before_forward(self, micro_batch: int) -> None:
        """Before the forward pass of a micro-batch, of the whole model or of a pipeline stage."""

    def after_forward(self, border_bytes: int = 0) -> None:
        """After it.

        Args:
            border_bytes: Bytes of a pipeline stage's input, which it keeps, less those of its output,
                which it sends.
        """

    def before_backward(self, micro_batch: int) -> None:
        """Before the backward pass of a micro-batch, which includes the recomputation of its activations."""

    def after_backward(self) -> None:
        """After the last backward pass: gradients are complete, not yet clipped or applied."""
