"""Copies of matrices in 16 bits that live from step to step: what compiled products read.

The parameters stay the float32 masters that the optimizer moves and checkpoints keep. Whoever changes them
says so, and the next forward pass begins with new copies. (Torch's count of a tensor's changes is no help:
fused optimizers do not count theirs.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from meshwright.models.feed_forward import GatedFeedForward
from meshwright.models.linear import Linear, MergedLinear

if TYPE_CHECKING:  # they import this
    from meshwright.models.decoder import Block, Decoder


class WeightCopies:
    """Those of a decoder's products, its head included; embeddings and norms are read as they are."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype) -> None:
        """Make room for the copies, and tell the products.

        Args:
            decoder: Whose weights are whole on this rank.
            dtype: Of its products.
        """
        self._dtype = dtype
        self.copies: dict[nn.Parameter, Tensor] = {}
        """By master; of products that are one, views of what it reads."""
        self.is_stale = True
        """Whether masters have changed since the copies were made."""
        for block in decoder.list_blocks():
            attention, feed_forward = block.attention, block.ffn
            attention.qkv = self._join(block, [attention.wq, attention.wk, attention.wv])
            if isinstance(feed_forward, GatedFeedForward):
                feed_forward.gate_up = self._join(block, [feed_forward.gate, feed_forward.up])
            for linear in block.modules():
                if isinstance(linear, Linear) and linear.weight not in self.copies:
                    linear.weight_copy = self._make([linear])
        if decoder.last:
            decoder.head.weight_copy = self._make([decoder.head])

    def _join(self, block: Block, linears: Sequence[Linear]) -> MergedLinear | None:
        """One product of several; not where each asks other ranks, or adds a bias."""
        if any(type(linear) is not Linear or linear.bias is not None for linear in linears):
            return None
        del block.saved_gemms[1 : len(linears)]  # of so many one is left, which is kept as they were
        return MergedLinear(linears, self._make(linears))

    def _make(self, linears: Sequence[nn.Linear]) -> Tensor:
        masters = [cast(nn.Parameter, linear.weight) for linear in linears]
        rows = [len(master) for master in masters]
        whole = torch.empty(sum(rows), masters[0].shape[1], dtype=self._dtype, device=masters[0].device)
        self.copies |= dict(zip(masters, whole.split(rows), strict=True))
        return whole

    def refresh(self) -> None:
        """Copy the masters if they have changed; before a forward pass."""
        if self.is_stale:
            with torch.no_grad():
                torch._foreach_copy_(list(self.copies.values()), [master.detach() for master in self.copies])
            self.is_stale = False
