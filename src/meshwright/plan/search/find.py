"""Prices every layout of a space and keeps the best.

Nothing is left out that could be the best. Two bounds save work, and what they rule out is counted as pruned:

- Memory. What does not fit with 1F1B and one stage a rank does not fit with GPipe, ZB-H1 or even interleaved
  stages either: they hold the same layers and at least as many micro-batches on every rank (``dominated``).
- Time. What is slower, by its bound, than all layouts that are kept already cannot be among the best
  (``bounds.py``): whole numbers of devices fall by it, and schedules of a layout whose 1F1B is priced.
  Rankings by cost or by memory do not use it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from meshwright.plan.estimate.grid import RECOMPUTES, SCHEDULES, Flags, Floats, Grid
from meshwright.plan.estimate.memory import MemoryEstimate, estimate_memory
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.search.bounds import products_s, schedules_floor_s
from meshwright.plan.search.enumerate import Chunk, Space, world_sizes
from meshwright.plan.time.engine import StepEstimate, estimate_step
from meshwright.spec.job import Job

By = Literal["time", "cost", "memory"]
ONE_F_ONE_B = SCHEDULES.index("1f1b")
NO_LESS = [SCHEDULES.index(name) for name in ("gpipe", "1f1b", "zb-h1")]
"""Schedules with one stage a rank that hold no fewer micro-batches than 1F1B."""
AWAY = ("optimizer", "all")
OFFLOAD_MARGIN = 0.05
"""By how much offloading must be faster than full recomputation to be taken."""
MOST_TO_SEARCH_AGAIN = 1_000_000
"""Layouts up to which a search that found only full recomputation is repeated with offloading."""
Progress = Callable[[int, int], None]
"""Called with the layouts done and the layouts in all."""


def no_progress(done: int, total: int) -> None:
    """For searches that nobody watches."""


@dataclass(frozen=True)
class Ranked:
    """Layouts in their order, with what they were ranked by."""

    grid: Grid
    step_s: Floats
    peak_bytes: Floats

    def __len__(self) -> int:
        return len(self.grid)

    def take(self, places: np.ndarray) -> Ranked:
        """Some of them."""
        return Ranked(self.grid.take(places), self.step_s[places], self.peak_bytes[places])


@dataclass
class Found:
    """What a search saw and kept."""

    job: Job
    by: By
    evaluated: int = 0
    """Layouts whose memory and time were both computed."""
    pruned: int = 0
    """Layouts that a bound ruled out."""
    illegal: int = 0
    fit: int = 0
    seconds: float = 0.0
    best: Ranked | None = None
    """Those that fit, best first."""
    least: Grid | None = None
    """The one that needs the least of its device's and its host's memory, whether it fits or not."""
    least_need: float = math.inf
    """What it needs of the scarcer of the two, as a share of what there is."""
    without_offload_s: float | None = None
    """The shortest step without offloading, where offloading is so much faster that it was taken."""
    rates: list[Floats] = field(default_factory=list)
    """Step times of all that fit, for the picture."""

    def counts(self) -> dict[str, Any]:
        """How much was looked at, for programs."""
        return {
            "evaluated": self.evaluated,
            "pruned": self.pruned,
            "illegal": self.illegal,
            "fit": self.fit,
            "search_s": self.seconds,
        }


def find_layouts(
    job: Job,
    pins: dict[str, Any],
    top: int,
    by: By = "time",
    progress: Progress = no_progress,
    worlds: Sequence[int] | None = None,
) -> Found:
    """Search all legal layouts, and those that offload where little or nothing else fits.

    Args:
        job: For a decoder.
        pins: Keys that keep their value.
        top: How many of the best are kept.
        by: What is best: the shortest step, the least device time a step, or the most memory left.
        progress: Told from time to time.
        worlds: Numbers of devices to try; even parts of the cluster if left out.
    """
    started = time.perf_counter()
    sizes = worlds or world_sizes(job)
    found = Found(job, by)
    here = ("none", *AWAY) if by == "memory" else ("none",)
    _search(found, [Space(job, n, pins, here) for n in sizes], top, progress)
    if "offload" not in pins and by != "memory":
        if not found.fit:
            _search(found, [Space(job, n, pins, AWAY) for n in sizes], top, progress)
        elif _starved(found):
            _try_offload(found, [Space(job, n, pins, AWAY) for n in sizes], top, progress)
    found.seconds = time.perf_counter() - started
    return found


def _starved(found: Found) -> bool:
    """Whether memory is so short that the best layout computes everything again."""
    cheap = found.evaluated + found.pruned <= MOST_TO_SEARCH_AGAIN
    return cheap and found.best is not None and RECOMPUTES[int(found.best.grid.recompute[0])] == "full"


def _try_offload(found: Found, spaces: list[Space], top: int, progress: Progress) -> None:
    """Add the layouts that offload, where the best of them is faster by more than a small margin.

    No published run stands behind their predictions, so a few percent do not make them the answer.
    """
    assert found.best is not None, "something fits without offloading"
    away = Found(found.job, found.by)
    _search(away, spaces, top, progress)
    found.evaluated += away.evaluated
    found.pruned += away.pruned
    score = [
        float(objective(found.by, r.grid, r.step_s, r.peak_bytes)[0]) for r in (found.best, away.best) if r
    ]
    if away.best is not None and score[1] < (1 - OFFLOAD_MARGIN) * score[0]:
        found.without_offload_s = float(found.best.step_s[0])
        found.fit += away.fit
        found.rates += away.rates
        found.best = best_of(found.by, top, found.best, away.best)


def _search(found: Found, spaces: list[Space], top: int, progress: Progress) -> None:
    workload = Workload.of(found.job)
    total = sum(len(space) for space in spaces)
    done = 0
    for space in spaces:
        found.illegal += space.illegal
        if _cannot_win(found, workload, space.world_size, top):
            found.pruned += len(space)
            done += len(space)
            continue
        for chunk in space.chunks():
            _search_chunk(found, workload, chunk, top)
            done += int(chunk.sizes.sum())
            progress(done, total)


def _search_chunk(found: Found, workload: Workload, chunk: Chunk, top: int) -> None:
    """Price every row with 1F1B, then those of its other schedules that may still be among the best."""
    plain = chunk.least()
    memory, step = estimate_memory(workload, plain), estimate_step(workload, plain)
    _keep_least(found, workload, chunk, plain, memory)
    if chunk.space.has_plain:
        _keep_best(found, workload, plain, memory, step, top)
    grid, rows = chunk.grow(), np.repeat(np.arange(len(plain)), chunk.sizes)
    left = np.ones(len(grid), dtype=np.bool_)
    if chunk.space.has_plain:
        left = (grid.schedule != ONE_F_ONE_B) | (grid.virtual_stages != 1)
    hopeless = ~memory.fits(workload)[rows] & dominated(chunk.space.model.num_layers, grid)
    hopeless |= schedules_floor_s(workload, step, grid, rows) > _limit(found, top)
    found.pruned += int((left & hopeless).sum())
    left &= ~hopeless
    if left.any():
        grid = grid.take(left)
        memory, step = estimate_memory(workload, grid), estimate_step(workload, grid)
        _keep_best(found, workload, grid, memory, step, top)


def dominated(layers: int, grid: Grid) -> Flags:
    """Layouts that need at least the memory of the same with 1F1B and one stage a rank."""
    even = (grid.schedule == SCHEDULES.index("interleaved")) & (layers % (grid.pp * grid.virtual_stages) == 0)
    return np.asarray(np.isin(grid.schedule, NO_LESS) | even, dtype=np.bool_)


def _cannot_win(found: Found, workload: Workload, devices: int, top: int) -> bool:
    """Whether so few devices are slower, at their peak rate, than all that is kept already."""
    return products_s(workload, devices) > _limit(found, top)


def _limit(found: Found, top: int) -> float:
    """The step that a layout must beat to be kept; bounds are of time, and say nothing of memory or cost."""
    if found.by != "time" or found.best is None or len(found.best) < top:
        return math.inf
    return float(found.best.step_s[-1])


def _keep_least(found: Found, workload: Workload, chunk: Chunk, plain: Grid, memory: MemoryEstimate) -> None:
    """Of the rows that have a schedule, the one that needs least; with a schedule that it may have."""
    need = np.where(chunk.sizes > 0, _need(workload, memory), np.inf)
    place = np.array([np.argmin(need)])
    row, need = plain.take(place), need[place]
    if np.isfinite(need[0]) and not chunk.space.has_plain:
        row = chunk.grow(place)
        need = _need(workload, estimate_memory(workload, row))
    if need.min() < found.least_need:
        found.least, found.least_need = row.take(np.array([np.argmin(need)])), float(need.min())


def _need(workload: Workload, memory: MemoryEstimate) -> Floats:
    """What layouts need of the scarcer of device and host, as a share of what there is."""
    cluster = workload.cluster
    need = memory.peak_bytes / cluster.memory_bytes
    if cluster.host_memory_bytes:
        need = np.maximum(need, memory.host_bytes / cluster.host_memory_bytes)
    return np.asarray(need, dtype=np.float64)


def _keep_best(
    found: Found, workload: Workload, grid: Grid, memory: MemoryEstimate, step: StepEstimate, top: int
) -> None:
    found.evaluated += len(grid)
    fits = np.flatnonzero(memory.fits(workload))
    found.fit += len(fits)
    if not len(fits):
        return
    found.rates.append(step.step_s[fits] * grid.world_size[fits])
    score = objective(found.by, grid, step.step_s, memory.peak_bytes)[fits]
    if len(fits) > 4 * top:  # ties beyond the last are kept here and ordered below
        limit = np.partition(score, top - 1)[top - 1]
        fits = fits[score <= limit]
    ranked = Ranked(grid.take(fits), step.step_s[fits], memory.peak_bytes[fits])
    found.best = best_of(found.by, top, *([found.best] if found.best else []), ranked)


def objective(by: By, grid: Grid, step_s: Floats, peak_bytes: Floats) -> Floats:
    """What is made small."""
    if by == "memory":
        return peak_bytes
    return step_s * grid.world_size if by == "cost" else step_s


def best_of(by: By, top: int, *lists: Ranked) -> Ranked:
    """The best of several lists, in order; what is equal in nine digits is ordered by simplicity."""
    joined = Ranked(
        Grid(
            **{name: np.concatenate([getattr(r.grid, name) for r in lists]) for name in vars(lists[0].grid)}
        ),
        np.concatenate([r.step_s for r in lists]),
        np.concatenate([r.peak_bytes for r in lists]),
    )
    score = objective(by, joined.grid, joined.step_s, joined.peak_bytes)
    with np.errstate(divide="ignore"):
        digits = 10.0 ** (8 - np.floor(np.log10(np.maximum(score, 1e-300))))
    rounded = np.round(score * digits) / digits
    order = np.lexsort((joined.peak_bytes, complexity(joined.grid), joined.step_s, rounded))
    return joined.take(order[:top])


def complexity(grid: Grid) -> Floats:
    """How much there is to go wrong: axes in use, settings away from their default, large degrees."""
    axes = [grid.pp, grid.cp, grid.tp, grid.ep, grid.etp, grid.dp_shard, grid.dp_replicate]
    weights = [8, 6, 4, 4, 4, 2, 1]
    used = sum(((axis > 1) * weight for axis, weight in zip(axes, weights, strict=True)), np.zeros(len(grid)))
    settings = (
        (grid.offload > 0) * 4.0
        + (grid.schedule != 1) * 2.0
        + (grid.virtual_stages > 1)
        + (grid.recompute > 0)
        + (grid.zero > 0) * 0.5 * grid.zero
        + (grid.context > 0)
    )
    return np.asarray(used + settings + 0.01 * np.log2(grid.pp * grid.cp * grid.tp), dtype=np.float64)


def with_cluster(job: Job, **changes: Any) -> Job:
    """The job on a changed cluster."""
    return replace(job, cluster=replace(job.cluster, **changes))
