"""Activations that the ranks of a pipeline hold at once, by schedule, on columns."""

from __future__ import annotations

import numpy as np

from meshwright.plan.estimate.grid import Floats, Grid, Ints
from meshwright.schedule.pipeline.closed_forms import CODES, peak_in_flight

V_SHAPED = (CODES["zbv"], CODES["dualpipe-v"])
"""Schedules whose first rank has both ends of the model."""


def count_in_flight(grid: Grid, rank: Ints, micro_batches: Ints) -> Floats:
    """Micro-batches whose activations a pipeline rank holds at its fullest, all its layers counted as one.

    The closed forms of the walked schedules.
    """
    interleaved, v_shaped = grid.schedule == CODES["interleaved"], np.isin(grid.schedule, V_SHAPED)
    stages = np.where(interleaved, grid.virtual_stages, np.where(v_shaped, 2, 1))
    held = peak_in_flight(grid.schedule, rank, grid.pp, grid.virtual_stages, micro_batches) / stages
    return np.where(grid.pp == 1, 1.0, held)
