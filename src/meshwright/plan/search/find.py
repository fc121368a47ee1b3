"""Searches the layouts of a job: a vectorised stage prunes and ranks, the exact prediction decides.

1. **Prune and rank.** Every layout of the space gets a lower bound of its peak memory (``memory_bound.py``)
   and an estimated step time, vectorised. Layouts whose memory bound does not fit are pruned, and those whose
   time bound (``time_bound.py``) is above the shortlist. The fastest of the rest are the shortlist.
2. **Check.** The shortlist is predicted exactly, fastest first (``plan.predict``: memory, collectives, time),
   until enough layouts fit. Only these are shown and written.

A search ends within its time budget; it then reports that it stopped early and how much it did not see.
Layouts that this version cannot train have no exact prediction: both stages use the memory estimate.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from meshwright.plan.estimate.grid import OFFLOADS, Flags, Floats, Grid
from meshwright.plan.estimate.memory import estimate_memory
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.memory.fit import usable_bytes
from meshwright.plan.predict import (
    Prediction,
    complete_layout,
    does_fit,
    is_exact,
    needed_at_ends,
    predict,
    predict_memory,
    predict_with_memory,
)
from meshwright.plan.search.memory_bound import EndCosts, PeakBound
from meshwright.plan.search.space import Chunk, LayoutSpace, world_sizes
from meshwright.plan.search.time_bound import gemm_floor_s, schedule_floor_s
from meshwright.plan.time.engine import StepEstimate, estimate_step
from meshwright.plan.time.stages import assign_stages
from meshwright.spec.job import Job
from meshwright.spec.layout import SCHEDULES, Layout
from meshwright.spec.legality.table import find_problems, with_layout

Objective = Literal["time", "cost", "memory"]
ONE_F_ONE_B = SCHEDULES.index("1f1b")
OFFLOADING = ("optimizer", "all")
OFFLOAD_MARGIN = 0.05
"""Speed-up over full activation checkpointing from which offloading is chosen."""
SIMPLICITY_MARGIN = {"cuda": 0.01, "cpu": 0.1}
"""The simplest layout within this share of the best is recommended. CPU times are rough."""
CHECKED = 64
"""Number of layouts that fit exactly after which a search ends."""
SHORTLIST = 2048
"""Layouts that the first stage keeps; many of them may not fit exactly."""
BUDGET_S = 8.0
"""CPU seconds of a whole search."""
FEWEST_CHECKED = 16
"""Layouts that are checked whatever the time."""
TIE_BREAK = 1e-6
"""Weight of the tie break."""
LOW_MEMORY_EVERY = 8
"""While nothing fits, every n-th check is of the layout with the next smallest memory bound."""
PRUNING_SHARE = 0.6
"""Share of the time budget for the first stage."""
Progress = Callable[[int, int], None]
"""Called with the layouts done and the total."""


def no_progress(done: int, total: int) -> None:
    """No progress output."""


@dataclass(frozen=True)
class RankedLayouts:
    """Layouts in order, with the values that they are ranked by."""

    grid: Grid
    step_s: Floats
    """Estimated, with the closed form of the pipeline bubble."""
    needed_bytes: Floats
    """A lower bound; the estimate where there is no exact prediction."""

    def __len__(self) -> int:
        return len(self.grid)

    def take(self, indices: np.ndarray) -> RankedLayouts:
        """Some of the layouts."""
        return RankedLayouts(self.grid.take(indices), self.step_s[indices], self.needed_bytes[indices])


@dataclass
class SearchResult:
    """The layouts that a search kept, and how many it saw."""

    job: Job
    objective: Objective = "time"
    pins: dict[str, Any] = field(default_factory=dict)
    """Layout keys that the job fixes."""
    evaluated: int = 0
    """Layouts whose memory bound and time were both computed."""
    pruned: int = 0
    """Layouts that a bound excluded."""
    illegal: int = 0
    may_fit: int = 0
    """Evaluated layouts that the memory bound does not exclude."""
    checked: int = 0
    """Layouts that were predicted exactly."""
    seconds: float = 0.0
    stopped_early: bool = False
    """Whether the time budget ended the search."""
    unseen: int = 0
    """Layouts that were not evaluated because of it."""
    best: list[Prediction] = field(default_factory=list)
    """Layouts that fit, best first; the first is recommended."""
    closest: Prediction | None = None
    """If nothing fits: the checked layout that is closest to fitting."""
    without_offload_s: float | None = None
    """The shortest step without offload, where offload was chosen because it is much faster."""
    rates: list[Floats] = field(default_factory=list)
    """Device seconds per step of the layouts that may fit, for the plot."""
    shortlist: RankedLayouts | None = None
    """Result of the first stage, best first."""

    def __repr__(self) -> str:
        return f"SearchResult(evaluated={self.evaluated}, checked={self.checked}, best={self.best[:1]})"

    def counts(self) -> dict[str, Any]:
        """The counts for ``--json``."""
        return {
            "evaluated": self.evaluated,
            "pruned": self.pruned,
            "illegal": self.illegal,
            "may_fit": self.may_fit,
            "checked": self.checked,
            "fit": len(self.best),
            "search_s": self.seconds,
            "stopped_early": self.stopped_early,
        }


def find_layouts(
    job: Job,
    pins: dict[str, Any],
    top: int = CHECKED,
    objective: Objective = "time",
    progress: Progress = no_progress,
    worlds: Sequence[int] | None = None,
    budget_s: float | None = None,
) -> SearchResult:
    """Search all legal layouts; with offload only where little or nothing else fits.

    Args:
        job: With a decoder.
        pins: Keys that keep their value.
        top: Number of layouts to find.
        objective: What to minimize: step time, device time per step (cost), or memory per rank.
        progress: Called from time to time.
        worlds: World sizes to try; divisors of the cluster by default.
        budget_s: Seconds after which the search ends; :data:`BUDGET_S` if left out.
    """
    search = _Search(job, pins, top, objective, progress, worlds or world_sizes(job), budget_s or BUDGET_S)
    may_offload = "offload" not in pins and job.cluster.device == "cuda"  # on CPUs all state is there already
    found = search.run(("none", *OFFLOADING) if objective == "memory" and may_offload else ("none",))
    if may_offload and objective != "memory":
        if not found.best:
            search.run(OFFLOADING)
        elif found.best[0].layout.recompute == "full":
            _compare_offloading(search, found)
    found.seconds = time.perf_counter() - search.started
    return found


def _compare_offloading(search: _Search, found: SearchResult) -> None:
    """Choose offload where it is faster than full activation checkpointing by more than a margin.

    Few runs back the predictions of offloading, so a few percent do not decide.
    """
    before = found.best[0]
    away = _Search(
        search.job, search.pins, search.top, search.objective, search.progress, search.worlds, search.left_s()
    ).run(OFFLOADING)
    found.evaluated += away.evaluated
    found.pruned += away.pruned
    found.checked += away.checked
    found.unseen += away.unseen
    found.stopped_early |= away.stopped_early
    if away.best and score(search.objective, away.best[0]) < (1 - OFFLOAD_MARGIN) * score(
        search.objective, before
    ):
        found.without_offload_s = before.step_s
        found.may_fit += away.may_fit
        found.rates += away.rates
        found.best = order_best(search.objective, [*away.best, *found.best])[: search.top]


class _Search:
    """One search: its two stages and its time budget."""

    def __init__(
        self,
        job: Job,
        pins: dict[str, Any],
        top: int,
        objective: Objective,
        progress: Progress,
        worlds: Sequence[int],
        budget_s: float,
    ) -> None:
        self.job, self.pins, self.top, self.objective = job, pins, top, objective
        self.progress, self.worlds, self.budget_s = progress, worlds, budget_s
        self.order = objective
        """Objective of the shortlist."""
        self.started = time.perf_counter()
        self.cpu_started = time.process_time()
        self.found = SearchResult(job, objective, pins)
        self.workload = Workload.of(job)
        self.usable = usable_bytes(job.cluster)
        one_rank = with_layout(job, Layout("given"))
        rules = [p for p in find_problems(one_rank) if not p.path.startswith("layout")]
        self.bound = PeakBound(job)
        self.exact = not rules
        """Whether this version trains such jobs, so that memory is exact."""
        self._closest: tuple[float, Layout] | None = None
        """The checked layout closest to fitting: needed over usable memory, and the layout."""
        self._smallest: tuple[float, Layout] | None = None
        """The same among layouts that the bound excludes."""

    def left_s(self) -> float:
        """CPU seconds until the search must end: other processes on this machine do not change the result."""
        return self.budget_s - (time.process_time() - self.cpu_started)

    def run(self, offloads: tuple[str, ...]) -> SearchResult:
        """Both stages, for layouts with these values of ``offload``.

        If nothing on the shortlist fits but other layouts may, both stages run again, ranked by memory bound.
        """
        spaces = [LayoutSpace(self.job, world, self.pins, offloads) for world in self.worlds]
        self.order, self.found.shortlist = self.objective, None
        self._build_shortlist(spaces)
        self._check()
        if not self.found.best and self.found.may_fit > SHORTLIST and self.order != "memory":
            seen = dataclasses.replace(self.found)
            self.order, self.found.shortlist = "memory", None
            self._build_shortlist(spaces)
            self._check()
            for name in ("evaluated", "pruned", "illegal", "may_fit", "unseen", "rates"):  # counted before
                setattr(self.found, name, getattr(seen, name))
        return self.found

    def _build_shortlist(self, spaces: list[LayoutSpace]) -> None:
        """The first stage: the shortlist."""
        found, total = self.found, sum(len(space) for space in spaces)
        left_for_checks = self.budget_s * (1 - PRUNING_SHARE)
        done = 0
        for space in spaces:
            found.illegal += space.illegal
            if gemm_floor_s(self.workload, space.world_size) > self._limit():
                found.pruned += len(space)
                done += len(space)
                continue
            for chunk in space.chunks():
                self._rank_chunk(chunk)
                done += int(chunk.sizes.sum())
                self.progress(done, total)
                if self.left_s() < left_for_checks:
                    found.stopped_early, found.unseen = True, found.unseen + total - done
                    return

    def _limit(self) -> float:
        """The step time that a layout must beat to enter a full shortlist; infinite for other objectives."""
        shortlist = self.found.shortlist
        if self.order != "time" or shortlist is None or len(shortlist) < SHORTLIST:
            return math.inf
        return float(shortlist.step_s[-1])

    def _rank_chunk(self, chunk: Chunk) -> None:
        """Estimate every row with 1F1B, then its other schedules that may still enter the shortlist."""
        found, space = self.found, chunk.space
        with_1f1b = chunk.with_1f1b()
        possible = (chunk.sizes > 0) & self._runs(with_1f1b)
        rows = np.flatnonzero(
            (self._least_bytes(with_1f1b) <= self.usable) & self._fits_cpu_memory(with_1f1b) & possible
        )
        found.pruned += int(chunk.sizes.sum()) - int(chunk.sizes[rows].sum())
        if not len(rows):
            self._keep_smallest(with_1f1b.take(np.flatnonzero(possible)))
            return
        with_1f1b = with_1f1b.take(rows)
        step = estimate_step(self.workload, with_1f1b)
        ends = EndCosts.of(step)
        if space.has_1f1b:
            self._keep(with_1f1b, step, self._needed(with_1f1b, ends))
        grid, source = chunk.expand_schedules(rows), np.repeat(np.arange(len(rows)), chunk.sizes[rows])
        left = np.ones(len(grid), dtype=np.bool_)
        if space.has_1f1b:
            left = (grid.schedule != ONE_F_ONE_B) | (grid.virtual_stages != 1)
        hopeless = schedule_floor_s(self.workload, step, grid, source) > self._limit()
        found.pruned += int((left & hopeless).sum())
        left &= ~hopeless
        if left.any():
            grid = grid.take(left)
            needed = self._needed(grid, ends.take(source[left]))
            fits = needed <= self.usable
            found.pruned += int((~fits).sum())
            if fits.any():
                grid = grid.take(fits)
                self._keep(grid, estimate_step(self.workload, grid), needed[fits])

    def _runs(self, grid: Grid) -> Flags:
        """Flags of layouts that this version trains; all if the job is plan-only."""
        if not self.exact:
            return np.ones(len(grid), dtype=np.bool_)
        several = [axis > 1 for axis in (grid.pp, grid.dp_shard, grid.cp, grid.tp)]
        keys = np.stack((*several, grid.zero, grid.offload)).astype(np.int64)
        distinct, indices = np.unique(keys, axis=1, return_inverse=True)
        built = [self._is_built(*(int(number) for number in key)) for key in distinct.T]
        return np.array(built, dtype=np.bool_)[indices.reshape(-1)]

    def _is_built(self, pp: int, dp_shard: int, cp: int, tp: int, zero: int, offload: int) -> bool:
        """Whether such layouts are implemented; an axis is 0 if it is not used."""
        layout = Layout(
            "given", pp=1 + pp, dp_shard=1 + dp_shard, cp=1 + cp, tp=1 + tp, zero=zero,
            offload=OFFLOADS[offload], micro_batch=1,  # type: ignore[arg-type]
        )  # fmt: skip
        problems = find_problems(with_layout(self.job, layout))
        return not any(problem.code.endswith("-not-built") for problem in problems)

    def _fits_cpu_memory(self, grid: Grid) -> Flags:
        """Whether offloaded state may fit the CPU memory per device."""
        room = self.job.cluster.host_memory_bytes
        if room is None or not grid.offload.any():
            return np.ones(len(grid), dtype=np.bool_)
        if self.exact:
            return self.bound.cpu_bytes(grid) <= room
        return estimate_memory(self.workload, grid).cpu_bytes <= room

    def _least_bytes(self, grid: Grid) -> Floats:
        """Least memory that a layout needs with any schedule."""
        if self.job.train.runtime == "meshwright":  # the estimate of its state is the same
            return self.bound.least_bytes(grid)
        return np.zeros(len(grid))

    def _needed(self, grid: Grid, ends: EndCosts) -> Floats:
        """A lower bound of the device memory that a layout needs; the estimate for plan-only jobs."""
        if self.exact:
            return self.bound.needed_bytes(grid, ends)
        return estimate_memory(self.workload, grid).peak_bytes

    def _keep(self, grid: Grid, step: StepEstimate, needed: Floats) -> None:
        found = self.found
        found.evaluated += len(grid)
        fits = np.flatnonzero(needed <= self.usable)
        found.may_fit += len(fits)
        if not len(fits):
            self._keep_smallest(grid)
            return
        found.rates.append(step.step_s[fits] * grid.world_size[fits])
        ranked = RankedLayouts(grid.take(fits), step.step_s[fits], needed[fits])
        found.shortlist = _best_of(self.order, *([found.shortlist] if found.shortlist else []), ranked)

    def _keep_smallest(self, grid: Grid) -> None:
        """Remember the layout closest to fitting, while the shortlist is empty."""
        if not len(grid) or self.found.shortlist is not None:
            return
        lean = grid.take(np.flatnonzero(grid.micro_batch == grid.micro_batch.min()))
        share = self._needed(lean, EndCosts.of(estimate_step(self.workload, lean))) / self.usable
        if (room := self.job.cluster.host_memory_bytes) is not None:
            share = np.maximum(share, self.bound.cpu_bytes(lean) / room) + TIE_BREAK * share
        index = int(np.argmin(share))
        if self._smallest is None or share[index] < self._smallest[0]:
            self._smallest = float(share[index]), lean.layout(index)

    def _check(self) -> None:
        """The second stage: predict exactly, best first, until enough fit or the time is up."""
        found = self.found
        fitting: list[Prediction] = []
        for number, layout in enumerate(self._list_shortlist()):
            if len(fitting) >= self.top:
                break
            if self.left_s() < 0 and number >= FEWEST_CHECKED:
                found.stopped_early = True
                break
            tries = [layout]
            if not fitting and number % LOW_MEMORY_EVERY == LOW_MEMORY_EVERY - 1:
                tries += self._list_low_memory(number // LOW_MEMORY_EVERY)
            fitting += [p for tried in tries if (p := self._predict(tried)) is not None]
        found.best = order_best(self.objective, _without_repeats(fitting))[: self.top]
        if not fitting:
            if self._smallest is not None:
                self._predict(self._smallest[1])
            found.closest = None if self._closest is None else predict(self.job, self._closest[1])

    def _list_shortlist(self) -> Iterator[Layout]:
        """The layouts of the shortlist, with layers assigned to their pipeline stages."""
        shortlist = self.found.shortlist
        for start in range(0, 0 if shortlist is None else len(shortlist), CHECKED):
            assert shortlist is not None, "has a length"
            grid = shortlist.grid.take(np.arange(start, min(start + CHECKED, len(shortlist))))
            layouts = [grid.layout(index) for index in range(len(grid))]
            yield from assign_stages(self.job, layouts, estimate_step(self.workload, grid))

    def _list_low_memory(self, number: int) -> list[Layout]:
        """The layout of the shortlist with the next smallest memory bound."""
        shortlist = self.found.shortlist
        if shortlist is None or number >= len(shortlist):
            return []
        return [shortlist.grid.layout(int(np.argsort(shortlist.needed_bytes, kind="stable")[number]))]

    def _predict(self, layout: Layout) -> Prediction | None:
        """Predict one layout; None if it is illegal or does not fit. Memory is predicted first."""
        settled = with_layout(self.job, complete_layout(self.job, layout))
        exact = is_exact(settled)
        if self.exact and not exact:
            return None
        self.found.checked += 1
        share = needed_at_ends(settled) / self.usable if exact and settled.layout.pp > 1 else 0.0
        if share <= 1:
            memory = predict_memory(settled, exact)
            if does_fit(settled, memory):
                return predict_with_memory(settled, memory, exact)
            share = memory.need.needed_bytes / self.usable
            cpu_share = memory.cpu_bytes / (self.job.cluster.host_memory_bytes or math.inf)
            share = max(share, cpu_share) + TIE_BREAK * share  # ties: the one that needs less device memory
        if self._closest is None or share < self._closest[0]:
            self._closest = share, settled.layout
        return None


def _without_repeats(found: list[Prediction]) -> list[Prediction]:
    return list({prediction.layout: prediction for prediction in found}.values())


def score(objective: Objective, prediction: Prediction) -> float:
    """The value to minimize."""
    if objective == "memory":
        return float(prediction.needed_bytes)
    return prediction.step_s * (prediction.layout.world_size if objective == "cost" else 1)


def order_best(objective: Objective, found: list[Prediction]) -> list[Prediction]:
    """Best first, except that the simplest layout within a small margin comes first."""
    ranked = sorted(
        found, key=lambda p: (score(objective, p), p.step_s if objective == "memory" else p.needed_bytes)
    )
    if not ranked:
        return []
    if objective == "memory":
        return ranked
    margin = SIMPLICITY_MARGIN[ranked[0].job.cluster.device]
    near = [p for p in ranked if score(objective, p) <= score(objective, ranked[0]) * (1 + margin)]
    simplest = min(near, key=lambda p: (float(complexity(Grid.of([p.layout]))[0]), score(objective, p)))
    return [simplest, *(p for p in ranked if p is not simplest)]


def _best_of(objective: Objective, *lists: RankedLayouts) -> RankedLayouts:
    """The best of several lists, in order; values equal in nine digits are ordered by simplicity."""
    joined = RankedLayouts(
        Grid(
            **{name: np.concatenate([getattr(r.grid, name) for r in lists]) for name in vars(lists[0].grid)}
        ),
        np.concatenate([r.step_s for r in lists]),
        np.concatenate([r.needed_bytes for r in lists]),
    )
    value = rank_values(objective, joined)
    if len(joined) > SHORTLIST:  # keeps ties with the last, ordered below
        limit = np.partition(value, SHORTLIST - 1)[SHORTLIST - 1]
        joined = joined.take(np.flatnonzero(value <= limit))
        value = rank_values(objective, joined)
    with np.errstate(divide="ignore"):
        digits = 10.0 ** (8 - np.floor(np.log10(np.maximum(value, 1e-300))))
    rounded = np.round(value * digits) / digits
    order = np.lexsort((joined.needed_bytes, complexity(joined.grid), rounded))
    return joined.take(order[:SHORTLIST])


def rank_values(objective: Objective, ranked: RankedLayouts) -> Floats:
    """The values that the first stage minimizes."""
    if objective == "memory":
        return ranked.needed_bytes
    return ranked.step_s * ranked.grid.world_size if objective == "cost" else ranked.step_s


def complexity(grid: Grid) -> Floats:
    """Complexity of a layout: axes in use, settings other than their default, large degrees."""
    axes = [grid.pp, grid.cp, grid.tp, grid.ep, grid.etp, grid.dp_shard, grid.dp_replicate]
    weights = [8, 6, 4, 4, 4, 2, 1]
    used = sum(((axis > 1) * weight for axis, weight in zip(axes, weights, strict=True)), np.zeros(len(grid)))
    settings = (
        (grid.offload > 0) * 4.0
        + (grid.schedule != 1) * 2.0
        + np.log2(grid.virtual_stages)
        + (grid.recompute > 0)
        + (grid.zero > 0) * 0.5 * grid.zero
        + (grid.context > 0)
    )
    return np.asarray(used + settings + 0.01 * np.log2(grid.pp * grid.cp * grid.tp), dtype=np.float64)


def with_cluster(job: Job, **changes: Any) -> Job:
    """The job with changed cluster fields."""
    return replace(job, cluster=replace(job.cluster, **changes))
