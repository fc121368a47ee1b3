"""Ulysses: context parallel by all-to-alls that swap positions for heads.

Before attention a rank has a contiguous run of positions of all heads. Every rank sends the heads of
rank s to rank s and gets all positions of its own heads. After attention it goes back the same way.
Key heads fewer than ranks are repeated.

Shape suffixes: B batch, T tokens of a sequence on this rank, L tokens of whole sequences, H query heads,
K key heads, E head size, R ranks, P heads of queries, keys and values on one rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.models.attention import causal_attention
from meshwright.parallel.collectives import all_to_all
from meshwright.parallel.context import ContextParallel


class UlyssesContextParallel(ContextParallel):
    """Contiguous positions; attention over whole sequences for some heads."""

    def positions_of(self, rank: int) -> Tensor:
        """One contiguous run."""
        return torch.arange(self.length).chunk(self.size)[rank]

    def attend(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of this rank's heads over whole sequences."""
        q_BHLE, k_BKLE, v_BKLE = self._scatter_heads(q_BHTE, k_BKTE, v_BKTE)
        out_BHLE = causal_attention(q_BHLE, k_BKLE, v_BKLE, mask)
        parts_RBHTE = out_BHLE.unflatten(2, (self.size, -1)).movedim(2, 0)
        return _AllToAll.apply(parts_RBHTE, self.name).movedim(0, 1).flatten(1, 2)

    def _scatter_heads(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of this rank's heads at all positions, in one all-to-all."""
        repeats = max(1, self.size // k_BKTE.shape[1])
        if repeats > 1:
            k_BKTE, v_BKTE = (part.repeat_interleave(repeats, dim=1) for part in (k_BKTE, v_BKTE))
        parts = [part.unflatten(1, (self.size, -1)).movedim(1, 0) for part in (q_BHTE, k_BKTE, v_BKTE)]
        received_RBPTE = _AllToAll.apply(torch.cat(parts, dim=2), self.name)
        return received_RBPTE.movedim(0, 2).flatten(2, 3).split([part.shape[2] for part in parts], dim=1)


class _AllToAll(torch.autograd.Function):
    """All-to-all of equal parts. The gradient is an all-to-all, too."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: str) -> Tensor:
        ctx.group = group
        return all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_to_all(grad, ctx.group), None
