"""Time of one block, of the head and of the embedding on CPUs.

A block takes the time of its GEMMs and attention by FLOPs, of several passes over its activations at the
memory bandwidth, and of eager Python, which is not overlapped on a CPU.
"""

from __future__ import annotations

import numpy as np

from meshwright.plan.estimate.grid import Floats
from meshwright.plan.time.activation_bytes import (
    BACKWARD_PASSES,
    FORWARD_PASSES,
    SELECTIVE_PASSES,
    block_bytes,
    head_bytes,
)
from meshwright.plan.time.block import BlockModel, Passes
from meshwright.plan.time.gemm import Sizes, gemm_s

ATTENTION_BACKWARD = 2.0
"""FLOPs of attention's backward pass, over those of its forward pass."""


class CpuBlockModel(BlockModel):
    """Estimates a block of a workload on CPUs, for a grid of layouts."""

    def linear(
        self, rows: Sizes, columns: Sizes, depth: Sizes, count: Sizes = 1, unquantized: bool = False
    ) -> Passes:
        """Three GEMMs of equal FLOPs; gradient accumulation is part of the passes over activations."""
        each = gemm_s(self.device, rows, columns, depth, count, unquantized)
        return Passes(each, each, each)

    def _fused(self, flops: Floats, span: int, v_dim: int) -> Passes:
        """Attention at the GEMM rate, for any sequence length."""
        forward = flops / self.device.unquantized_flops_per_s
        return Passes(forward, ATTENTION_BACKWARD * forward, np.zeros_like(forward))

    def _elementwise(self, dense_share: float) -> Passes:
        """Passes over the activations of an average block, plus CPU launch time."""
        return self._memory_passes(block_bytes(self.workload, self.grid))

    def _selective_s(self, gemms: Passes, attention: Passes, elementwise: Passes, experts: Passes) -> Floats:
        cpu_launch_s = self.device.rates.cpu_launch_s
        return (elementwise.forward - cpu_launch_s) * (SELECTIVE_PASSES / FORWARD_PASSES)

    def head(self) -> Passes:
        """The head's GEMM, passes over logits and final norm, plus CPU launch time."""
        model = self.model
        gemm = self.linear(self.rows, model.vocab_size / self.tp, model.hidden_size)
        return self._order_head(gemm + self._memory_passes(head_bytes(self.workload, self.grid)))

    def _memory_passes(self, moved: Floats) -> Passes:
        scale, cpu_launch_s = moved / self.device.bytes_per_s, self.device.rates.cpu_launch_s
        return Passes(
            FORWARD_PASSES * scale + cpu_launch_s,
            BACKWARD_PASSES * scale + cpu_launch_s,
            np.zeros_like(scale),
        )
