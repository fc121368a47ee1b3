"""The legal layout nearest to an illegal one: the same number of ranks if possible, and few changes.

The distance is in doublings of degrees; a changed setting counts a tenth of a doubling. The planner predicts
the cost of the result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.core.errors import Problem
from meshwright.spec.job import Job
from meshwright.spec.layout import AXES, DEGREES, Layout
from meshwright.spec.legality.table import find_problems, with_layout
from meshwright.spec.numbers import divisors, split_ranks

SETTING_COST = 0.1
"""Distance of a changed setting, in doublings of a degree."""
MICRO_COST = 0.05
"""Distance of a doubling or halving of the micro-batch."""
MAX_RANKS_PER_CORE = 16
"""Ranks per CPU core up to which the number of ranks is kept."""
STAGE_SETTINGS: dict[str, Any] = {"accumulate": "sharded", "prefetch": 1, "offload": "none"}
"""Settings of some ZeRO stages, with values that every stage allows."""
BEAM_WIDTH = 2
"""Candidates that are kept after each change."""
SETTINGS: dict[str, tuple[Any, ...]] = {
    "zero": (3, 2, 1, 0),
    "accumulate": ("sharded",),
    "sequence_parallel": (False,),
    "schedule": ("1f1b",),
    "virtual_stages": (1, 2),
    "stage_layers": (None,),
    "schedule_file": (None,),
    "context": ("ring",),
    "recompute": ("none", "full"),
    "offload": ("none",),
    "prefetch": (1,),
    "placement": ("auto",),
    "backup_replicas": (1, 0),
}
"""Replacement values of a setting, in order of preference."""


def nearest_legal_layout(job: Job, to_run: bool = True) -> Layout:
    """The legal layout nearest to the job's; its own if that is legal.

    Problems that no layout can fix (of the model, for example) are ignored.

    Args:
        job: With the requested layout.
        to_run: False for a job that is only planned.
    """
    search = _Search(job, to_run)
    if not search.problems(job.layout):
        return job.layout
    for world in search.worlds():
        found = search.closest(world)
        if found is not None:
            return found
    return Layout(mode="given")


def layout_distance(requested: Layout, other: Layout) -> float:
    """Distance of two layouts: doublings of degrees, plus a little for each changed setting."""
    return _degree_distance(requested, other) + _setting_distance(requested, other)


def _degree_distance(requested: Layout, other: Layout) -> float:
    return sum(abs(math.log2(getattr(other, name) / getattr(requested, name))) for name in DEGREES)


def _setting_distance(requested: Layout, other: Layout) -> float:
    changed = {name for name in SETTINGS if getattr(requested, name) != getattr(other, name)}
    if requested.schedule == other.schedule == "interleaved" and requested.virtual_stages == 1:
        changed.discard("virtual_stages")  # none were requested
    cost = SETTING_COST * len(changed)
    if requested.micro_batch == other.micro_batch:
        return cost
    if requested.micro_batch is None or other.micro_batch is None:
        return cost + SETTING_COST
    return cost + MICRO_COST * abs(math.log2(other.micro_batch / requested.micro_batch))


@dataclass
class _Search:
    """The search for one job."""

    job: Job
    to_run: bool

    def __post_init__(self) -> None:
        plain = self._find(Layout(mode="given"))
        self._unfixable = {p.code for p in plain if not p.path.startswith("layout")}

    def _find(self, layout: Layout) -> list[Problem]:
        return find_problems(with_layout(self.job, layout), self.to_run)

    def problems(self, layout: Layout) -> list[Problem]:
        """The problems of a layout, without those of every layout."""
        return [p for p in self._find(layout) if p.code not in self._unfixable]

    def worlds(self) -> Iterator[int]:
        """World sizes to try: the requested one, capped by the devices, then smaller ones."""
        cluster, world = self.job.cluster, self._requested().world_size
        shared = cluster.device == "cpu" and cluster.preset == "local"  # CPU cores can be shared, GPUs not
        if not shared or world > MAX_RANKS_PER_CORE * cluster.world_size:
            world = min(world, cluster.world_size)
        yield from range(world, 0, -1)

    def closest(self, world: int) -> Layout | None:
        """The nearest legal layout of a world size."""
        requested = self._requested()
        tries = [dataclasses.replace(requested, mode="given", **degrees) for degrees in self._degrees(world)]
        # At equal distance prefer replicas, which are the simplest.
        tries.sort(key=lambda t: (round(_degree_distance(requested, t), 9), t.pp, t.cp, t.tp, t.dp_shard))
        best: tuple[float, Layout] | None = None
        for tried in tries:
            away = _degree_distance(requested, tried)
            if best is not None and away >= best[0]:
                break
            fixed = self._fix(tried)
            if fixed is not None and (best is None or layout_distance(requested, fixed) < best[0]):
                best = layout_distance(requested, fixed), fixed
        return best[1] if best else None

    def _requested(self) -> Layout:
        """The job's layout; a list of slots without degrees asks for as many replicas."""
        layout = self.job.layout
        slots = layout.placement
        if isinstance(slots, str) or layout.mode == "given" or not slots:
            return layout
        return dataclasses.replace(layout, mode="given", dp_replicate=len(slots))

    def _degrees(self, world: int) -> Iterator[dict[str, Any]]:
        requested = self.job.layout
        for degrees in split_ranks(world, len(AXES)):
            for ep in divisors(requested.ep):
                for etp in divisors(requested.etp):
                    yield {**dict(zip(AXES, degrees, strict=True)), "ep": ep, "etp": etp}

    def _fix(self, layout: Layout) -> Layout | None:
        """Change one setting at a time, as long as each change leaves fewer problems.

        It keeps the best candidates of each round, as one of them may be a dead end.
        """
        tries, left = [layout], len(self.problems(layout))
        while left:
            changed = {
                further: len(self.problems(further)) for one in tries for further in self._changed(one)
            }
            fewest = min(changed.values())
            if fewest >= left:
                return None
            left, tries = fewest, [new for new, count in changed.items() if count == fewest]
            tries = sorted(tries, key=lambda one: _setting_distance(self.job.layout, one))[:BEAM_WIDTH]
        return tries[0]

    def _changed(self, layout: Layout) -> Iterator[Layout]:
        """The layout with one setting changed."""
        for name, values in SETTINGS.items():
            for value in values:
                if value != getattr(layout, name):
                    change: dict[str, Any] = {name: value}
                    yield dataclasses.replace(layout, **change)
                    if name == "zero":  # settings of the old stage are reset with it
                        yield dataclasses.replace(layout, zero=value, **STAGE_SETTINGS)
        if layout.micro_batch is None:
            return
        share = -(-self.job.train.global_batch // layout.data_degree)
        for size in sorted({min(layout.micro_batch, share), *divisors(share)}, reverse=True):
            if size != layout.micro_batch:
                yield dataclasses.replace(layout, micro_batch=size)
