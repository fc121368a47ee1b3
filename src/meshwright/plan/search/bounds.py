"""What no step can be faster than, cheap enough to ask of every layout before it is priced.

The estimate adds launches, tiles that are not full, attention, passes over memory, communication and what
stages wait for each other; none of it is negative. So the matrix products alone, at the highest rate that the
estimate gives any product, are a bound; recomputation in full runs the blocks' forward products again, and a
pipeline without split backward passes cannot hide its fill and drain. A test holds the bound below the estimate.
"""

from __future__ import annotations

import numpy as np

from meshwright.plan.estimate.grid import RECOMPUTES, SCHEDULES, Floats, Grid
from meshwright.plan.estimate.products import TILES, Device
from meshwright.plan.estimate.rates import rates_of
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.search.counts import active_parameters

FULL = RECOMPUTES.index("full")
WITH_BUBBLE = [SCHEDULES.index(name) for name in ("gpipe", "1f1b", "interleaved")]


def highest_rate(workload: Workload) -> float:
    """FLOP/s that no product of the estimate exceeds."""
    rates = rates_of(workload)
    device = Device.of(workload, rates)
    tile = max(rate for *_, rate in TILES)
    return max(device.flops_per_s, device.plain_flops_per_s) * max(1.0, tile) * max(1.0, rates.expert_matmul)


def products_s(workload: Workload, devices: int) -> float:
    """All matrix products of a step, spread over so many devices at that rate."""
    return _device_s(workload, 6.0) / devices


def floor_s(workload: Workload, grid: Grid) -> Floats:
    """A bound for each layout."""
    once, again = _device_s(workload, 6.0), _device_s(workload, 2.0, head=False)
    work = np.where(grid.recompute == FULL, once + again, once) / grid.world_size
    fill = (grid.pp - 1) / (grid.micro_batches(workload.global_batch) * grid.virtual_stages)
    return np.asarray(work * np.where(np.isin(grid.schedule, WITH_BUBBLE), 1 + fill, 1.0), dtype=np.float64)


def _device_s(workload: Workload, flops: float, head: bool = True) -> float:
    """Seconds of one device for so many FLOPs a parameter and token; routers are too small to be counted."""
    model = workload.model
    parameters = active_parameters(model) - model.expert_layers * model.hidden_size * (model.num_experts or 0)
    if not head:
        parameters -= model.vocab_size * model.hidden_size
    return flops * parameters * workload.global_batch * workload.seq_len / highest_rate(workload)
