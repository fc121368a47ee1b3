"""The legal layout closest to one that was asked for: fewest doublings, then fewest changed settings."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from meshwright.plan.estimate.grid import Floats, Grid
from meshwright.plan.estimate.memory import estimate_memory
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.search.enumerate import Space, world_sizes
from meshwright.plan.search.predict import Prediction, predict_layouts
from meshwright.plan.search.settle import settle_micro_batch
from meshwright.spec.job import Job
from meshwright.spec.layout import DEGREES, Layout
from meshwright.spec.nearest import MICRO_COST, SETTING_COST

SETTINGS = ("zero", "sequence_parallel", "schedule", "virtual_stages", "context", "recompute")
MOST_TIES = 64
SAME = 1e-9
"""Distances that differ by less are equal."""


def find_nearest(job: Job, asked: Layout, fitting: bool = False) -> Prediction | None:
    """The nearest legal layout, priced; of equally near ones the fastest that fits, else the smallest.

    A micro-batch that is not asked for is the one that such a layout would get.

    Args:
        job: What is planned; its own layout does not matter.
        asked: A layout that a rule forbids, or that does not fit.
        fitting: Whether only layouts that fit count.
    """
    devices = job.cluster.world_size
    worlds = {*world_sizes(job), *([asked.world_size] if asked.world_size <= devices else [])}
    pins = {"offload": asked.offload} if job.cluster.device != "cpu" else {}
    workload = Workload.of(job)
    nearest = math.inf
    ties: list[Layout] = []
    for world in sorted(worlds, reverse=True):
        for chunk in Space(job, world, pins).chunks():
            grid = chunk.grow()
            if asked.micro_batch is None:
                grid = grid.take(np.flatnonzero(grid.micro_batch == 1))
            away = distance(grid, asked)
            near = np.flatnonzero(away <= nearest + SAME)
            if fitting and len(near):
                near = near[estimate_memory(workload, grid.take(near)).fits(workload)]
            if not len(near):
                continue
            least = float(away[near].min())
            if least < nearest - SAME:
                nearest, ties = least, []
            places = near[away[near] <= nearest + SAME][:MOST_TIES]
            ties += [grid.layout(int(place)) for place in places]
    if asked.micro_batch is None:
        open_ = [dataclasses.replace(layout, micro_batch=None) for layout in ties[:MOST_TIES]]
        ties = [settle_micro_batch(job, layout) for layout in open_]
    priced = predict_layouts(job, ties[:MOST_TIES])
    return min(priced, key=lambda p: (not p.fits, p.step_s if p.fits else p.peak_bytes), default=None)


def distance(grid: Grid, asked: Layout) -> Floats:
    """How far each layout of a grid is from the one asked for."""
    wanted = Grid.of([asked])
    total = np.zeros(len(grid))
    for name in DEGREES:
        total += np.abs(np.log2(getattr(grid, name) / getattr(wanted, name)))
    for name in SETTINGS:
        if name == "virtual_stages" and asked.schedule == "interleaved" and asked.virtual_stages == 1:
            continue  # none were asked for
        total += SETTING_COST * (getattr(grid, name) != getattr(wanted, name))
    if asked.micro_batch is not None:
        total += MICRO_COST * np.abs(np.log2(grid.micro_batch / asked.micro_batch))
    return total
