"""Memory of a rank, by stage, for every layout of a grid."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.plan.estimate.grid import Floats, Grid
from meshwright.plan.estimate.workload import Workload


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the fullest rank of each layout."""

    peak_bytes: Floats
    """What is allocated at the worst moment, plus what the allocator holds beside it."""
    lines: dict[str, Floats]
    """The parts of it; they add up to the peak."""

    def fits(self, workload: Workload) -> np.ndarray:
        """Which layouts stay within the device."""
        return self.peak_bytes <= workload.cluster.memory_bytes


def estimate_memory(workload: Workload, grid: Grid) -> MemoryEstimate:
    """A first rough sum: state by its ZeRO stage and the activations of the first stage."""
    model = workload.model
    layer = 4.0 * model.hidden_size**2 + 3.0 * model.hidden_size * model.ffn_size
    total = model.num_layers * layer + 2.0 * model.vocab_size * model.hidden_size
    mine = total / (grid.pp * grid.tp)
    shard = grid.dp_shard * grid.cp
    weights = 2 * mine / np.where(grid.zero >= 3, shard, 1)
    gradients = 4 * mine / np.where(grid.zero >= 2, shard, 1)
    optimizer = 12 * mine / np.where(grid.zero >= 1, shard, 1)
    tokens = grid.micro_batch * workload.seq_len / grid.cp
    kept = np.array([34.0, 24.0, 2.0])[grid.recompute]
    activations = tokens * model.hidden_size * kept * model.num_layers / grid.tp
    lines = {
        "parameters": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": activations,
    }
    return MemoryEstimate(sum(lines.values(), np.zeros(len(grid))), lines)
