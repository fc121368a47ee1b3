"""Fills what a given layout leaves open: the largest micro-batch that fits and leaves 2 x pp of them."""

from __future__ import annotations

import dataclasses

from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.memory import estimate_memory
from meshwright.plan.estimate.workload import Workload
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.legality import find_problems, with_layout


def settle_micro_batch(job: Job, layout: Layout) -> Layout:
    """The layout with its micro-batch; 1 where none fits."""
    if layout.micro_batch is not None:
        return layout
    share = -(-job.train.global_batch // layout.data_degree)
    most = -(-share // min(share, 2 * layout.pp))
    evened = sorted({-(-share // -(-share // size)) for size in range(1, most + 1)})
    choices = [dataclasses.replace(layout, micro_batch=size) for size in evened]
    legal = [c for c in choices if not find_problems(with_layout(job, c), to_run=False)] or choices[:1]
    workload = Workload.of(job)
    fits = estimate_memory(workload, Grid.of(legal)).fits(workload)
    fitting = [choice for choice, fit in zip(legal, fits, strict=True) if fit]
    return fitting[-1] if fitting else legal[0]
