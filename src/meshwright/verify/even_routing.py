"""Even expert routing for a dry run: fake scores select nothing, so experts are assigned round-robin.

Shape suffixes: N tokens of this rank, K experts per token, X ranks of ``ep`` x ``etp``, H experts of a rank.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from meshwright.models.moe import MixtureOfExperts
from meshwright.parallel.expert import ShardedTokens, TokenDispatcher
from meshwright.parallel.parallel_context import ParallelContext
from meshwright.spec.job import Job


def route_evenly(model: nn.Module, job: Job, parallel: ParallelContext) -> None:
    """Give every expert the same number of tokens, over all ranks."""
    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts):
            rank = 0
            if isinstance(layer.dispatch, TokenDispatcher):
                rank = layer.dispatch.rank
                layer.dispatch = EvenDispatcher(job, parallel.mesh)
            layer.router.choose = functools.partial(choose_round_robin, rank)
            if isinstance(layer.tokens, ShardedTokens):
                layer.tokens = EvenTokens(job, parallel.mesh, parallel.tp, parallel.cp)


def choose_round_robin(rank: int, scores: Tensor, chosen: Tensor) -> Tensor:
    """Assign experts in turn; each rank starts where the rank before it ends."""
    slots = torch.arange(chosen.numel(), dtype=torch.int64).view_as(chosen)
    return (slots + rank * chosen.numel()) % scores.shape[1]


def even_counts(outgoing_XH: Tensor, rank: int, num_experts: int, etp: int) -> Tensor:
    """The rows that each rank sends to the experts of this rank, if all of them assign round-robin.

    Args:
        outgoing_XH: The rows that this rank sends.
        rank: Rank of this process, in the group of experts.
        num_experts: Number of experts of the layer.
        etp: Tensor-parallel degree of experts.
    """
    ranks, held = outgoing_XH.shape
    sent = int(outgoing_XH.sum()) // etp
    starts = torch.arange(ranks).unsqueeze(1) * sent
    own = torch.arange(held) + rank // etp * held
    return (sent - (own - starts) % num_experts + num_experts - 1) // num_experts


class EvenDispatcher(TokenDispatcher):
    """Assumes that every other rank sends as many rows as this one, round-robin."""

    def exchange_counts(self, outgoing_XH: Tensor) -> Tensor:
        """Call the collective, and compute what it would return."""
        super().exchange_counts(outgoing_XH)
        return even_counts(outgoing_XH, self.rank, self._experts, self._etp)


class EvenTokens(ShardedTokens):
    """Assumes that the tokens of every other rank chose what those of this rank did."""

    def gather(self, experts_NK: Tensor) -> Tensor:
        """Call the collective, and compute what it would return."""
        ranks = len(super().gather(experts_NK)) // len(experts_NK)
        return experts_NK.repeat(ranks, 1)
