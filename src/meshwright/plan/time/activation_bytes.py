"""Activation bytes of eager steps; memory traffic of elementwise work is a multiple of them."""

from __future__ import annotations

import numpy as np

from meshwright.plan.estimate.activations import SavedBytes, Tokens, block_saved_bytes, norm_input_bytes
from meshwright.plan.estimate.grid import Floats, Grid
from meshwright.plan.estimate.state import FLOAT32
from meshwright.plan.estimate.workload import Workload

FORWARD_PASSES, BACKWARD_PASSES = 3, 5
"""Times that the activations of an eager step cross the memory bus."""
SELECTIVE_PASSES = 2
"""Times that selective activation checkpointing adds; full adds a forward pass."""


def count_passes(recompute: str) -> int:
    """Times that the activations of an eager step cross the memory bus, by ``layout.recompute``."""
    recompute_passes = {"none": 0, "selective": SELECTIVE_PASSES, "full": FORWARD_PASSES}
    return FORWARD_PASSES + BACKWARD_PASSES + recompute_passes[recompute]


def block_bytes(workload: Workload, grid: Grid) -> Floats:
    """Activation bytes of one micro-batch in an average block of an eager step."""
    model, tokens = workload.model, Tokens.of(workload, grid)
    routed = model.expert_layers / model.num_layers
    total = np.zeros(len(grid))
    for expert, share in ((False, 1 - routed), (True, routed)):
        if share:
            total = total + share * _sum_bytes(block_saved_bytes(workload, expert)[0], tokens, workload, grid)
    return total


def _sum_bytes(kept: SavedBytes, tokens: Tokens, workload: Workload, grid: Grid) -> Floats:
    """Saved activation bytes of one kind of block; routing is balanced."""
    copies = tokens.split * (workload.model.experts_per_token or 0)
    return (
        kept.shared * tokens.residual
        + kept.gathered * tokens.gathered
        + kept.split * tokens.split
        + kept.scores * tokens.scores
        + kept.routed * copies * grid.etp
        + kept.routed_inner * copies
        + kept.second_output * tokens.exchanged
    )


def head_bytes(workload: Workload, grid: Grid) -> Floats:
    """The final norm's activations and float32 logits of one micro-batch."""
    model, tokens = workload.model, Tokens.of(workload, grid)
    logits = tokens.split * model.vocab_size * FLOAT32
    return tokens.residual * norm_input_bytes(workload) + logits


def touched_bytes(workload: Workload, grid: Grid) -> Floats:
    """Activation bytes of one micro-batch in all layers of an eager step, without a pipeline."""
    return workload.model.num_layers * block_bytes(workload, grid) + head_bytes(workload, grid)
