"""Time of the optimizer step: on the device, streamed through it, or on the CPU."""

from __future__ import annotations

import numpy as np

from meshwright.layout.parameters import FLOAT32_BYTES
from meshwright.plan.estimate.grid import OFFLOADS, Floats, Grid
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.time.gemm import Device

OFFLOAD_OPTIMIZER, OFFLOAD_ALL = OFFLOADS.index("optimizer"), OFFLOADS.index("all")
HALF_BYTES = 2.0
STREAMED_SHARE = 0.84
"""Bandwidth of a CPU link per direction while buckets of state are copied in and out, over the preset's: 39
to 46 GB/s in steps of 0.7, 1.5 and 1.7 G parameters on an H200."""


def streamed_weight_bytes(workload: Workload) -> float:
    """Bytes per weight that is copied from CPU memory: as it is stored there."""
    halved = workload.profile.memory.master_weights and workload.precision != "fp32"
    return HALF_BYTES if halved else float(FLOAT32_BYTES)


def streamed_s(update_s: Floats | float, state_bytes: Floats | float, link_bytes_per_s: float) -> Floats:
    """An update on the device, while its state is copied in and out over the CPU link."""
    return np.maximum(update_s, state_bytes / (STREAMED_SHARE * link_bytes_per_s))


def optimizer_s(workload: Workload, device: Device, grid: Grid, updated: Floats) -> Floats:
    """The optimizer step: memory traffic, Muon's GEMMs, and copies of offloaded state.

    Args:
        workload: The model, the optimizer and the framework.
        device: The device of a rank.
        grid: The layouts.
        updated: Parameters that a rank updates.
    """
    rules, rate, link = workload.profile.time, workload.optimizer, workload.cluster.host_bytes_per_s
    moved = updated * (rules.optimizer_bytes if rate is None else rate.moved_bytes)
    on_device = moved / device.bytes_per_s
    if rate is not None and rate.flops:
        on_device = on_device + updated * rate.flops / device.unquantized_flops_per_s
    if device.multiprocessors:
        on_device = on_device + updated * rules.clip_bytes / device.bytes_per_s
    # The CPU's Adam of a rank's shard; gradients to it, and weights from it unless every pass copies them.
    weight = np.where(grid.offload == OFFLOAD_ALL, 0.0, streamed_weight_bytes(workload))
    on_cpu = moved / (rules.cpu_adam_share * link) + updated * (FLOAT32_BYTES + weight) / link
    state = updated * (2 * workload.profile.memory.moment_bytes if rate is None else rate.state_bytes)
    if device.multiprocessors:
        streamed = streamed_s(on_device, state, link)
    else:
        streamed = on_device + 4 * state / device.bytes_per_s  # read and written, in and out
    offloaded = np.where(
        rules.streams_optimizer_state & (grid.offload == OFFLOAD_OPTIMIZER), streamed, on_cpu
    )
    return np.asarray(np.where(grid.offload > 0, offloaded, on_device))
