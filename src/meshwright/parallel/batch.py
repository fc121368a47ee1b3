"""A micro-batch: the arguments of a model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.parallel.mesh import to_device


class Batch(NamedTuple):
    """A micro-batch: a model's arguments, in its order."""

    inputs: Tensor
    """Tokens, (micro_batch, seq_len), or the rank's positions of them where ranks share sequences; or images.
    """
    targets: Tensor
    """The next tokens, as many, or labels."""
    segments: Tensor | None = None
    """The number of each token's document, (micro_batch, seq_len), with ``data.mask=document``."""
    weights: Tensor | None = None
    """Each sample's share of the global batch, (micro_batch,), for a model with experts."""

    def to_device(self, device: torch.device) -> list[Tensor | None]:
        """The arguments on a device; those at the end that are none are left out."""
        last = max(index for index, tensor in enumerate(self) if tensor is not None)
        return [to_device(tensor, device) for tensor in self[: last + 1]]

    def pin_memory(self) -> Batch:
        """The same in memory that a GPU copies from without the host waiting."""
        return Batch._make(None if tensor is None else tensor.pin_memory() for tensor in self)
