"""Time of a step, part by part, for every layout of a grid."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.plan.estimate.grid import Floats, Grid
from meshwright.plan.estimate.workload import Workload


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of each layout's step."""

    step_s: Floats
    parts: dict[str, Floats]
    """What the step consists of; the parts add up to it. Hidden communication is not in here."""
    hidden: dict[str, Floats]
    """Communication that computation hides."""


def estimate_step(workload: Workload, grid: Grid) -> StepEstimate:
    """A first rough sum."""
    model, cluster = workload.model, workload.cluster
    layer = 4.0 * model.hidden_size**2 + 3.0 * model.hidden_size * model.ffn_size
    flops = 6 * (model.num_layers * layer + model.vocab_size * model.hidden_size)
    tokens = workload.global_batch * workload.seq_len
    rate = 0.6 * cluster.bf16_flops_per_s
    compute = tokens * flops * np.where(grid.recompute == 2, 4 / 3, 1.0) / grid.world_size / rate
    micro_batches = grid.micro_batches(workload.global_batch)
    bubble = compute * (grid.pp - 1) / (micro_batches * grid.virtual_stages)
    crossing = np.where(
        grid.tp > cluster.devices_per_node, cluster.nic_bytes_per_s or 1e10, cluster.link_bytes_per_s
    )
    moved = 4 * 2 * tokens * model.hidden_size * model.num_layers / (grid.pp * grid.data_degree * grid.cp)
    tp_s = np.where(grid.tp > 1, moved * 2 / crossing, 0.0)
    parts = {"compute": compute, "bubble": bubble, "tp": tp_s}
    return StepEstimate(sum(parts.values(), np.zeros(len(grid))), parts, {})
