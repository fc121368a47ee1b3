"""Activations that the ranks of a pipeline hold at once, by schedule, on columns."""

from __future__ import annotations

import numpy as np

from meshwright.plan.estimate.grid import SCHEDULES, Floats, Grid, Ints
from meshwright.schedule.closed_forms import CODES, peak_in_flight

_DUAL = SCHEDULES.index("dualpipe-v")
V_SHAPED = (CODES["zbv"], _DUAL)
"""Schedules whose first rank has both ends of the model."""


def count_in_flight(grid: Grid, rank: Ints, micro_batches: Ints) -> Floats:
    """Micro-batches whose activations a pipeline rank holds at its fullest, all its layers counted as one.

    The closed forms of the walked schedules. DualPipe-V holds 2 p + 1 of its half stages (DeepSeek 2025).
    """
    dual = grid.schedule == _DUAL
    codes = np.where(dual, CODES["zbv"], grid.schedule)
    stages = np.where(
        codes == CODES["interleaved"], grid.virtual_stages, np.where(codes == CODES["zbv"], 2, 1)
    )
    held = peak_in_flight(codes, rank, grid.pp, grid.virtual_stages, micro_batches) / stages
    held = np.where(dual, np.minimum(micro_batches, grid.pp + 0.5), held)
    return np.where(grid.pp == 1, 1.0, held)
