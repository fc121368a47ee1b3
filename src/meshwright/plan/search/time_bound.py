"""Lower bounds of the step time: for a number of devices, and for a layout with any pipeline schedule.

The estimate adds launches, partial tiles, attention, memory traffic, communication and idle time to the
GEMMs; none of it is negative. So the GEMMs alone, at the highest GEMM rate of the estimate, bound every
layout on a number of devices.

Only the bubble, uneven stages and transfers of a step depend on the schedule, and with interleaved stages the
exposed part of reductions. Without them, the step with 1F1B bounds the same step with any schedule. Schedules
that do not split the backward pass also idle for (pp - 1) / virtual_stages micro-batches of work. Tests check
that both bounds stay below the estimate.
"""

from __future__ import annotations

import numpy as np

from meshwright.layout.parameters import count_active_matmul_parameters
from meshwright.plan.estimate.grid import Floats, Grid, Ints
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.time.engine import WORK_PARTS, StepEstimate
from meshwright.plan.time.gemm import TILES, Device
from meshwright.plan.time.probed import fastest_gemm
from meshwright.plan.time.rates import rates_of
from meshwright.spec.layout import SCHEDULES

INTERLEAVED = SCHEDULES.index("interleaved")
WITH_BUBBLE = [SCHEDULES.index(name) for name in ("gpipe", "1f1b", "interleaved")]
SCHEDULE_PARTS = ("bubble", "uneven stages", "pipeline transfers")
"""Parts of a step that depend on the schedule."""
MATRIX_SHARE = 0.99
"""Least share of the parameters in matrices; the rest are norms and biases, which have no GEMM."""


def highest_rate(workload: Workload) -> float:
    """FLOP/s that no GEMM of the estimate exceeds."""
    rates = rates_of(workload)
    device = Device.of(workload, rates)
    tile = max(rate for *_, rate in TILES)
    counted = max(device.flops_per_s, device.unquantized_flops_per_s) * max(1.0, tile)
    probed = workload.cluster.probed
    return max(counted * max(1.0, rates.expert_matmul), 0.0 if probed is None else fastest_gemm(probed))


def gemm_floor_s(workload: Workload, devices: int) -> float:
    """Time of a step's GEMMs, without the routers', on a number of devices at that rate."""
    model = workload.model
    routers = model.expert_layers * model.hidden_size * (model.num_experts or 0)
    matrices = MATRIX_SHARE * (count_active_matmul_parameters(model) - routers)
    flops = 6.0 * matrices * workload.global_batch * workload.seq_len
    return flops / highest_rate(workload) / devices


def schedule_floor_s(workload: Workload, with_1f1b: StepEstimate, grid: Grid, rows: Ints) -> Floats:
    """A lower bound for each layout of a grid.

    Args:
        workload: What is estimated.
        with_1f1b: Estimates of the same layouts with 1F1B and one stage per rank.
        grid: Layouts with other schedules.
        rows: For each of them, its index in ``with_1f1b``.
    """
    none = np.zeros(len(with_1f1b.step_s))
    fixed = with_1f1b.step_s - sum((with_1f1b.parts[name] for name in SCHEDULE_PARTS), none)
    work = sum((with_1f1b.parts[name] for name in WORK_PARTS), none)
    waits = (grid.pp - 1) / (grid.virtual_stages * grid.micro_batches(workload.global_batch))
    bubble = np.where(np.isin(grid.schedule, WITH_BUBBLE), waits * work[rows], 0.0)
    fixed = np.where(
        grid.schedule == INTERLEAVED, (fixed - _hideable_s(workload, with_1f1b))[rows], fixed[rows]
    )
    return np.asarray(fixed + bubble, dtype=np.float64)


def _hideable_s(workload: Workload, with_1f1b: StepEstimate) -> Floats:
    """The most of the exposed reductions and all-gathers that other stages could still hide."""
    exposed, hidden = with_1f1b.parts["gradient reduction"], with_1f1b.hidden["data parallel"]
    rates = rates_of(workload)
    whole = exposed + hidden * (1 - rates.contention)
    return np.maximum(exposed - (1 - rates.overlap) * whole, 0.0)
