"""Parameters that collectives and the optimizer move: of an average block, and of the largest rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.plan.estimate.grid import Floats, Grid, Ints
from meshwright.plan.estimate.weights import WeightCounts
from meshwright.spec.model import DecoderModel


@dataclass(frozen=True)
class ParameterCounts:
    """Number of elements that one rank has before ZeRO shards them."""

    block: Floats
    """An average block without its routed experts."""
    expert_block: Floats
    """The routed experts of an average block."""
    rank: Floats
    """Blocks, embedding and head of the largest rank, without routed experts."""
    expert_rank: Floats
    """Routed experts of a rank."""

    def updated(self, grid: Grid) -> Floats:
        """Elements that a rank updates: its shard under ZeRO, else all."""
        sharded = grid.zero > 0
        over = np.where(sharded, grid.dp_shard * grid.cp, 1)
        left = np.where(sharded, expert_shards(grid), 1)
        return self.rank / over + self.expert_rank / left

    def gathered_block(self, grid: Grid) -> Floats:
        """Elements of an average block that ZeRO-3 gathers from other ranks."""
        dense = self.block * (grid.dp_shard * grid.cp > 1)
        return dense + self.expert_block * (expert_shards(grid) > 1)


def expert_shards(grid: Grid) -> Ints:
    """Ranks that shard an expert's state: dp_shard x cp x tp / (ep x etp)."""
    left: Ints = np.maximum(grid.dp_shard * grid.cp * grid.tp // np.maximum(grid.ep * grid.etp, 1), 1)
    return left


def count_rank_parameters(model: DecoderModel, grid: Grid) -> ParameterCounts:
    """The parameters of a rank of each layout."""
    weights = WeightCounts.of(model)
    expert_share = model.expert_layers / model.num_layers
    split = weights.attention + (1 - expert_share) * weights.ffn + expert_share * weights.shared
    block = split / grid.tp + weights.latents + weights.norms + expert_share * weights.router
    experts = expert_share * weights.expert * (model.num_experts or 0)
    expert_block = experts / (grid.ep * grid.etp)
    layers = model.num_layers / grid.pp
    both = (grid.pp == 1) & (not model.tied_embeddings)
    ends = weights.table / grid.tp * np.where(both, 2.0, 1.0)
    return ParameterCounts(block, expert_block, block * layers + ends, expert_block * layers)
