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
from meshwright.models.linear import Joint, Product

if TYPE_CHECKING:  # they import this
    from meshwright.models.decoder import Block, Decoder


class WorkingCopies:
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
        self.stale = True
        """Whether masters have changed since the copies were made."""
        for block in decoder.list_blocks():
            attention, feed_forward = block.attention, block.ffn
            attention.joint = self._join(block, [attention.wq, attention.wk, attention.wv])
            if isinstance(feed_forward, GatedFeedForward):
                feed_forward.joint = self._join(block, [feed_forward.gate, feed_forward.up])
            for product in block.modules():
                if isinstance(product, Product) and product.weight not in self.copies:
                    product.low = self._make([product])
        if decoder.last:
            decoder.head.low = self._make([decoder.head])

    def _join(self, block: Block, products: Sequence[Product]) -> Joint | None:
        """One product of several; not where each asks other ranks, or adds a bias."""
        if any(type(product) is not Product or product.bias is not None for product in products):
            return None
        del block.kept_products[1 : len(products)]  # of so many one is left, which is kept as they were
        return Joint(products, self._make(products))

    def _make(self, products: Sequence[nn.Linear]) -> Tensor:
        masters = [cast(nn.Parameter, product.weight) for product in products]
        rows = [len(master) for master in masters]
        whole = torch.empty(sum(rows), masters[0].shape[1], dtype=self._dtype, device=masters[0].device)
        self.copies |= dict(zip(masters, whole.split(rows), strict=True))
        return whole

    def refresh(self) -> None:
        """Copy the masters if they have changed; before a forward pass."""
        if self.stale:
            with torch.no_grad():
                torch._foreach_copy_(list(self.copies.values()), [master.detach() for master in self.copies])
            self.stale = False
