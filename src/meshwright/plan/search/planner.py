"""The planner: finds the layouts of a job, best first."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from meshwright.core.errors import Problem, UserError
from meshwright.plan.predict import complete_layout, predict, samples_per_rank
from meshwright.plan.search.alternatives import list_neighbours
from meshwright.plan.search.failure import given_layout_error, nothing_fits_error, search_error
from meshwright.plan.search.find import (
    BUDGET_S,
    CHECKED,
    Objective,
    Progress,
    SearchResult,
    find_layouts,
    no_progress,
    order_best,
)
from meshwright.plan.search.placement import place_found
from meshwright.plan.search.space import pinned_keys
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.legality.table import find_problems, with_layout
from meshwright.spec.model import DecoderModel, ResNetModel


def search_job(
    job: Job,
    named: Sequence[str] = (),
    top: int = CHECKED,
    objective: Objective = "time",
    progress: Progress = no_progress,
) -> SearchResult:
    """The given layout, or the best ones. Each is predicted exactly and fits.

    Args:
        job: Its layout may be open (``layout.mode="auto"``) or given.
        named: Layout keys that the user wrote; they keep their value.
        top: Number of layouts to return.
        objective: What to minimize.
        progress: Called from time to time.

    Raises:
        UserError: No layout fits, or none is legal; the error names changes that would fit.
    """
    found = _search_layouts(job, named, top, objective, progress)
    started = time.perf_counter()
    place_found(job, found)
    found.seconds += time.perf_counter() - started
    return found


def _search_layouts(
    job: Job, named: Sequence[str], top: int, objective: Objective, progress: Progress
) -> SearchResult:
    """The layouts, with ranks in rank order."""
    if job.layout.mode == "given":
        return _predict_given(job)
    if not isinstance(job.model, DecoderModel):
        return _search_replicas(job)
    pins = pinned_keys(job.layout, named)
    found = find_layouts(job, pins, top, objective, progress)
    if not found.best:
        raise search_error(job, pins, found)
    return _descend_memory(found, pins, top) if objective == "memory" else found


def _descend_memory(found: SearchResult, pins: dict[str, Any], top: int) -> SearchResult:
    """Local search: move to the neighbour with the least memory until no neighbour needs less.

    Memory bounds of layouts with offload are loose, so the first stage may rank a better one too low.
    """
    best, started, cpu_started = found.best[0], time.perf_counter(), time.process_time()
    while time.process_time() - cpu_started < BUDGET_S:
        layouts = [
            layout for _, layout in list_neighbours(best.job, best.layout) if _matches_pins(layout, pins)
        ]
        near = [prediction for layout in layouts if (prediction := predict(best.job, layout)).fits]
        found.checked += len(layouts)
        leanest = min(near, key=lambda p: (p.needed_bytes, p.step_s), default=best)
        if (leanest.needed_bytes, leanest.step_s) >= (best.needed_bytes, best.step_s):
            break
        best = leanest
        found.best = [best, *found.best][:top]
    found.seconds += time.perf_counter() - started
    return found


def _matches_pins(layout: Layout, pins: dict[str, Any]) -> bool:
    """Whether a layout has the pinned values."""
    return all(getattr(layout, name) == value for name, value in pins.items())


def _predict_given(job: Job) -> SearchResult:
    started = time.perf_counter()
    settled = with_layout(job, complete_layout(job, job.layout))
    problems = find_problems(settled, to_run=not find_problems(job))
    if problems:  # earlier checks had no micro-batch
        raise UserError(*problems)
    prediction = predict(job, settled.layout)
    if not prediction.fits:
        raise given_layout_error(prediction)
    seconds = time.perf_counter() - started
    return SearchResult(job, evaluated=1, may_fit=1, checked=1, best=[prediction], seconds=seconds)


def _search_replicas(job: Job) -> SearchResult:
    """Every dp_replicate degree that the cluster holds; a ResNet has no other axis."""
    found, started = SearchResult(job), time.perf_counter()
    predictions, refused = [], list[Problem]()
    for count in range(1, min(job.cluster.world_size, job.train.global_batch) + 1):
        layout = dataclasses.replace(job.layout, mode="given", dp_replicate=count)
        if not _divides_batch(job, layout):
            found.illegal += 1
            continue
        settled = complete_layout(job, layout)
        problems = find_problems(with_layout(job, settled))
        if problems:
            found.illegal += 1
            refused = problems
        else:
            predictions.append(predict(job, settled))
    if not predictions:
        raise UserError(*refused)
    fitting = [prediction for prediction in predictions if prediction.fits]
    if not fitting:
        raise nothing_fits_error(min(predictions, key=lambda p: p.needed_bytes), [])
    found.evaluated = found.checked = len(predictions)
    found.may_fit, found.best = len(fitting), order_best("time", fitting)
    found.seconds = time.perf_counter() - started
    return found


def _divides_batch(job: Job, layout: Layout) -> bool:
    """Whether the given micro-batch suits the samples per rank."""
    share, micro = samples_per_rank(job, layout), layout.micro_batch or 1
    if isinstance(job.model, ResNetModel) and job.mixes_samples:  # batch norm: no padding
        batch, ranks = job.train.global_batch, layout.dp_replicate
        return batch % (ranks * micro) == 0 and batch // ranks >= job.model.least_micro_batch
    return micro <= share
