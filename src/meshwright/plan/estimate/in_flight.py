"""Activations that the ranks of a pipeline hold at once, by schedule, on columns.

The closed forms of the walked schedules, in units of one micro-batch on all layers of a rank.
"""

from __future__ import annotations

import numpy as np

from meshwright.plan.estimate.grid import SCHEDULES, Floats, Grid, Ints

_CODE = {name: code for code, name in enumerate(SCHEDULES)}
V_SHAPED = (_CODE["zbv"], _CODE["dualpipe-v"])
"""Schedules whose first rank has both ends of the model."""


def count_in_flight(grid: Grid, rank: Ints, micro_batches: Ints) -> Floats:
    """Micro-batches whose activations a pipeline rank holds at its fullest.

    GPipe m; 1F1B min(m, p - r); interleaved (Narayanan et al. 2021) min(m v, 2 (p - r - 1) + (v - 1) p + 1)
    stages of 1 / v each; ZB-H1 min(m, p), as weight gradients still read them; the V schedules p, and half a
    micro-batch more where both directions meet (DualPipe-V).
    """
    p, v, m = grid.pp, grid.virtual_stages, micro_batches
    stages = np.minimum(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1)
    held = np.select(
        [grid.schedule == code for code in range(len(SCHEDULES))],
        [
            m,
            np.minimum(m, p - rank),
            stages / v,
            np.minimum(m, p),
            np.minimum(m, np.minimum(p, (m + rank + 1) / 2)),
            np.minimum(m, p + 0.5),
        ],
    )
    return np.where(p == 1, 1.0, held)
