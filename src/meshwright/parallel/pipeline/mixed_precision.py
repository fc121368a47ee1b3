"""The interface of mixed precision that a pipeline uses. ``train.amp`` implements it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge


class MixedPrecision(Protocol):
    """Autocast for the forward pass and loss scaling for the backward pass."""

    def autocast(self) -> AbstractContextManager[None]:
        """Context of a forward pass."""

    def backward(self, end: Tensor | GradientEdge, grad: Tensor | None = None) -> None:
        """Run the backward pass of a loss, scaled where the precision needs it, or of another output."""
