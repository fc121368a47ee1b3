"""bf16 weight copies of mixed precision: 16-bit copies that persist across steps; GEMMs read them.

The parameters stay float32 master weights, which the optimizer updates and checkpoints store. Code that
changes them sets :attr:`WeightCopies.is_stale`, and the next forward pass starts with new copies. (Torch's
version counters do not help: fused optimizers do not bump them.) With ``train.precision = "fp16"`` the copies
are float16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from meshwright.models.decoder import Block, Decoder
from meshwright.models.feed_forward import GatedFeedForward
from meshwright.models.linear import Linear, MergedLinear


class WeightCopies:
    """Copies for all linears of a decoder and its head; embeddings and norms have none."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype) -> None:
        """Allocate the copies, give them to the linears, and refresh them before each forward pass.

        Args:
            decoder: Its weights are not sharded on this rank.
            dtype: Dtype of its GEMMs.
        """
        self._dtype = dtype
        self.copies: dict[nn.Parameter, Tensor] = {}
        """By master weight; those of merged linears are views of one tensor."""
        self.is_stale = True
        """Whether the masters have changed since the last refresh."""
        for block in decoder.list_blocks():
            attention, feed_forward = block.attention, block.ffn
            attention.qkv = self._merge(block, [attention.wq, attention.wk, attention.wv])
            if isinstance(feed_forward, GatedFeedForward):
                feed_forward.gate_up = self._merge(block, [feed_forward.gate, feed_forward.up])
            for linear in block.modules():
                if isinstance(linear, Linear) and linear.weight not in self.copies:
                    linear.weight_copy = self._allocate([linear])
        if decoder.last:
            decoder.head.weight_copy = self._allocate([decoder.head])
        decoder.register_forward_pre_hook(lambda *_: self.refresh())

    def _merge(self, block: Block, linears: Sequence[Linear]) -> MergedLinear | None:
        """Merge linears; None for tensor-parallel ones and for ones with a bias."""
        if any(type(linear) is not Linear or linear.bias is not None for linear in linears):
            return None
        # Several GEMMs become one; activation checkpointing saves its output too.
        del block.checkpointing.saved_gemms[1 : len(linears)]
        return MergedLinear(linears, self._allocate(linears))

    def _allocate(self, linears: Sequence[nn.Linear]) -> Tensor:
        masters = [cast(nn.Parameter, linear.weight) for linear in linears]
        rows = [len(master) for master in masters]
        merged = torch.empty(sum(rows), masters[0].shape[1], dtype=self._dtype, device=masters[0].device)
        self.copies |= dict(zip(masters, merged.split(rows), strict=True))
        return merged

    def refresh(self) -> None:
        """Copy the master weights if they have changed."""
        if self.is_stale:
            with torch.no_grad():
                torch._foreach_copy_(list(self.copies.values()), [master.detach() for master in self.copies])
            self.is_stale = False
