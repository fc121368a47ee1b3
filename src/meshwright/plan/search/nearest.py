"""The legal layout closest to one that was asked for: fewest doublings, then fewest changed settings."""

from __future__ import annotations

import numpy as np

from meshwright.plan.estimate.grid import Floats, Grid
from meshwright.plan.search.enumerate import Space, world_sizes
from meshwright.plan.search.predict import Prediction, predict_layouts
from meshwright.spec.job import Job
from meshwright.spec.layout import DEGREES, Layout

SETTINGS = ("zero", "sequence_parallel", "schedule", "virtual_stages", "context", "recompute")
SETTING_WEIGHT = 0.1
"""A changed setting counts as a tenth of a doubled degree."""
MICRO_WEIGHT = 0.05
MOST_TIES = 64


def find_nearest(job: Job, asked: Layout) -> Prediction | None:
    """The nearest legal layout, priced; of equally near ones the fastest that fits.

    Args:
        job: What is planned; its own layout does not matter.
        asked: A layout that a rule forbids.
    """
    devices = job.cluster.world_size
    worlds = {*world_sizes(job), *([asked.world_size] if asked.world_size <= devices else [])}
    offload = {"offload": asked.offload} if job.cluster.device != "cpu" else {}
    best: list[tuple[float, Layout]] = []
    for world in worlds:
        for chunk in Space(job, world, offload).chunks():
            grid = chunk.grow()
            if not len(grid):
                continue
            away = distance(grid, asked)
            least = float(away.min())
            if not best or least < best[0][0] - 1e-9:
                best = []
            if not best or least < best[0][0] + 1e-9:
                best += [
                    (least, grid.layout(int(p))) for p in np.flatnonzero(away <= least + 1e-9)[:MOST_TIES]
                ]
    priced = predict_layouts(job, [layout for _, layout in best[:MOST_TIES]])
    return min(priced, key=lambda p: (not p.fits, p.step_s), default=None)


def distance(grid: Grid, asked: Layout) -> Floats:
    """How far each layout of a grid is from the one asked for."""
    wanted = Grid.of([asked])
    total = np.zeros(len(grid))
    for name in DEGREES:
        total += np.abs(np.log2(getattr(grid, name) / getattr(wanted, name)))
    for name in SETTINGS:
        total += SETTING_WEIGHT * (getattr(grid, name) != getattr(wanted, name))
    if asked.micro_batch is not None:
        total += MICRO_WEIGHT * np.abs(np.log2(grid.micro_batch / asked.micro_batch))
    return total
