"""A micro-batch: the arguments of a model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.parallel.mesh import to_device


class Batch(NamedTuple):
    """A micro-batch: a model's arguments, in its order."""

    inputs: Tensor
    """Images, or tokens (micro_batch, seq_len). With context parallelism only the positions of this rank."""
    targets: Tensor
    """The next token of each input token, or labels."""
    segments: Tensor | None = None
    """The document of each token, (micro_batch, seq_len), with ``data.mask=document``."""
    weights: Tensor | None = None
    """For a model with experts, (micro_batch, 2): each sample's share of the global batch, and its number of
    tokens without padding. Both are 0 for a zero-weight sample."""

    def to_device(self, device: torch.device) -> list[Tensor | None]:
        """The arguments on a device, without the trailing ones that are None."""
        last = max(index for index, tensor in enumerate(self) if tensor is not None)
        return [to_device(tensor, device) for tensor in self[: last + 1]]

    def pin_memory(self) -> Batch:
        """The batch in pinned memory, from which a GPU copies asynchronously."""
        return Batch._make(None if tensor is None else tensor.pin_memory() for tensor in self)
