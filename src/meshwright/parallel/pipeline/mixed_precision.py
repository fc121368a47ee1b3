"""What a pipeline needs of mixed precision; ``train.amp`` implements it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class MixedPrecision(Protocol):
    """Autocast around a forward pass, and the scaled backward pass."""

    def autocast(self) -> AbstractContextManager[None]:
        """Around a forward pass."""

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a loss, scaled where the precision needs it."""
