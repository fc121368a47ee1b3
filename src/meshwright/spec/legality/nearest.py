"""The legal layout closest to one that a rule refuses: the same number of ranks, and few changes.

Only the legality table says what is legal. Degrees count by
their doublings, a changed setting by a tenth of one. Prices are the planner's business.
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
"""Of a setting that is changed, in doublings of a degree."""
MICRO_COST = 0.05
"""Of a doubling or halving of the micro-batch."""
MOST_SHARED = 16
"""Ranks that share a core before fewer of them are nearer to what was meant."""
STAGE_SETTINGS: dict[str, Any] = {"accumulate": "sharded", "prefetch": 1, "offload": "none"}
"""Settings that some ZeRO stages alone take, as every stage takes them."""
MOST_FOLLOWED = 2
"""Changes of settings that are followed at once."""
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
}
"""What a setting may become where the asked value is refused; of equally good ones the first."""


def nearest_legal_layout(job: Job, to_run: bool = True) -> Layout:
    """The layout closest to the asked one that no rule refuses; the asked one itself if none does.

    Rules that no layout can mend (of the model, say) are left aside.

    Args:
        job: With the layout that was asked for.
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


def layout_distance(asked: Layout, other: Layout) -> float:
    """How far two layouts are apart: doublings of degrees, and a little for each setting."""
    return _degree_distance(asked, other) + _setting_distance(asked, other)


def _degree_distance(asked: Layout, other: Layout) -> float:
    return sum(abs(math.log2(getattr(other, name) / getattr(asked, name))) for name in DEGREES)


def _setting_distance(asked: Layout, other: Layout) -> float:
    changed = {name for name in SETTINGS if getattr(asked, name) != getattr(other, name)}
    if asked.schedule == other.schedule == "interleaved" and asked.virtual_stages == 1:
        changed.discard("virtual_stages")  # none were asked for
    cost = SETTING_COST * len(changed)
    if asked.micro_batch == other.micro_batch:
        return cost
    if asked.micro_batch is None or other.micro_batch is None:
        return cost + SETTING_COST
    return cost + MICRO_COST * abs(math.log2(other.micro_batch / asked.micro_batch))


@dataclass
class _Search:
    """The search for one job, with what it has learned on the way."""

    job: Job
    to_run: bool

    def __post_init__(self) -> None:
        plain = self._find(Layout(mode="given"))
        self._beyond = {p.code for p in plain if not p.path.startswith("layout")}

    def _find(self, layout: Layout) -> list[Problem]:
        return find_problems(with_layout(self.job, layout), self.to_run)

    def problems(self, layout: Layout) -> list[Problem]:
        """What is wrong with a layout, without what is wrong with every one."""
        return [p for p in self._find(layout) if p.code not in self._beyond]

    def worlds(self) -> Iterator[int]:
        """The ranks asked for, as far as there are devices, then fewer."""
        cluster, world = self.job.cluster, self.job.layout.world_size
        shared = cluster.device == "cpu" and cluster.preset == "local"  # cores may be, GPUs not
        if not shared or world > MOST_SHARED * cluster.world_size:
            world = min(world, cluster.world_size)
        yield from range(world, 0, -1)

    def closest(self, world: int) -> Layout | None:
        """The nearest legal layout with so many ranks."""
        asked = self.job.layout
        tries = [dataclasses.replace(asked, mode="given", **degrees) for degrees in self._degrees(world)]
        # Of equally near ones, replicas are the simplest.
        tries.sort(key=lambda t: (round(_degree_distance(asked, t), 9), t.pp, t.cp, t.tp, t.dp_shard))
        best: tuple[float, Layout] | None = None
        for tried in tries:
            away = _degree_distance(asked, tried)
            if best is not None and away >= best[0]:
                break
            mended = self._mend(tried)
            if mended is not None and (best is None or layout_distance(asked, mended) < best[0]):
                best = layout_distance(asked, mended), mended
        return best[1] if best else None

    def _degrees(self, world: int) -> Iterator[dict[str, Any]]:
        asked = self.job.layout
        for degrees in split_ranks(world, len(AXES)):
            for ep in divisors(asked.ep):
                for etp in divisors(asked.etp):
                    yield {**dict(zip(AXES, degrees, strict=True)), "ep": ep, "etp": etp}

    def _mend(self, layout: Layout) -> Layout | None:
        """Change settings, one after the other, as long as each change leaves fewer problems.

        Of changes that leave equally few all are followed: one of them may lead nowhere.
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
            tries = sorted(tries, key=lambda one: _setting_distance(self.job.layout, one))[:MOST_FOLLOWED]
        return tries[0]

    def _changed(self, layout: Layout) -> Iterator[Layout]:
        """The layout with one setting changed."""
        for name, values in SETTINGS.items():
            for value in values:
                if value != getattr(layout, name):
                    change: dict[str, Any] = {name: value}
                    yield dataclasses.replace(layout, **change)
                    if name == "zero":  # what only the old stage had a use for goes with it
                        yield dataclasses.replace(layout, zero=value, **STAGE_SETTINGS)
        if layout.micro_batch is None:
            return
        share = -(-self.job.train.global_batch // layout.data_degree)
        for size in sorted({min(layout.micro_batch, share), *divisors(share)}, reverse=True):
            if size != layout.micro_batch:
                yield dataclasses.replace(layout, micro_batch=size)
