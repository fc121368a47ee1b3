"""CPU time of launching the kernels of a block; a GPU that finishes earlier waits for it."""

from __future__ import annotations

import numpy as np

from meshwright.plan.estimate.grid import Floats, Grid
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.time.rates import Rates

COLLECTIVE_CPU_LAUNCH_S = 5e-5
"""CPU time that a tensor-parallel collective adds to a pass for each doubling of its ranks: its launch, and
the wait for the slowest of their CPUs. From 408 small steps of Megatron-DeepSpeed on 8 A100s."""


def cpu_launch_s(workload: Workload, rates: Rates, grid: Grid, softmax_kernel_ratio: Floats) -> Floats:
    """CPU launch time per pass through an average block.

    Args:
        workload: The model and the framework.
        rates: Rates of the device.
        grid: The layouts.
        softmax_kernel_ratio: Kernels of a block without fused softmax, over those of one with it.
    """
    model, rules = workload.model, workload.profile.time
    if rules.cuda_graphs:
        return np.zeros(len(grid))
    routed = model.expert_layers / model.num_layers
    kernels = softmax_kernel_ratio * rules.cpu_launch_ratio
    if workload.precision in ("fp8", "fp4"):
        kernels = kernels * rules.quantized_launch_ratio
    seconds = rates.cpu_launch_s * kernels + rates.expert_cpu_launch_s * routed
    return np.asarray(seconds + COLLECTIVE_CPU_LAUNCH_S * 2 * np.log2(np.maximum(grid.tp, 1)))
