"""Why the neighbours of the best layout lost: one degree doubled or halved, or one setting changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.core.units import format_bytes, format_seconds
from meshwright.plan.estimate.grid import CONTEXTS, OFFLOADS, RECOMPUTES
from meshwright.plan.search.enumerate import (
    micro_batch_choices,
    virtual_stage_choices,
)
from meshwright.plan.search.find import By
from meshwright.plan.search.predict import Prediction, predict_layouts
from meshwright.plan.search.runtimes import reach_of
from meshwright.spec.job import Job
from meshwright.spec.layout import AXES, V_SCHEDULES, Layout
from meshwright.spec.legality import find_problems, with_layout
from meshwright.spec.model import DecoderModel

SAME = 1e-6
"""Relative difference below which two steps are the same."""


def list_neighbours(job: Job, layout: Layout) -> list[tuple[str, list[Layout]]]:
    """What changed, in words, and the layouts that it means; legal ones alone.

    A changed degree leaves the micro-batch open, so that it loses for what it is and not for a micro-batch
    that suited another; a changed setting is just that.
    """
    seen: set[Layout] = {layout}
    found = []
    for words, changed in _changes(job, layout):
        settled = _consistent(job, changed)
        if settled in seen:
            continue
        seen.add(settled)
        share = -(-job.train.global_batch // settled.data_degree)
        moved = any(getattr(settled, axis) != getattr(layout, axis) for axis in AXES)
        micros = micro_batch_choices(share) if moved else (settled.micro_batch,)
        choices = [dataclasses.replace(settled, micro_batch=micro) for micro in micros]
        legal = [c for c in choices if not find_problems(with_layout(job, c), to_run=False)]
        if legal:
            found.append((words, legal))
    return found


def _changes(job: Job, layout: Layout) -> Iterator[tuple[str, Layout]]:
    for axis in ("tp", "pp", "cp"):
        if axis in reach_of(job).axes:
            yield from _moved_degree(layout, axis)
    yield from _moved_data(layout)
    if layout.pp > 1:
        yield from _other_schedules(job, layout)
    micro = layout.micro_batch or 1
    values: dict[str, Sequence[Any]] = {
        "ep": (layout.ep * 2, layout.ep // 2) if "ep" in reach_of(job).axes else (),
        "etp": (layout.etp * 2, layout.etp // 2) if "etp" in reach_of(job).axes else (),
        "zero": [stage for stage in reach_of(job).zeros if stage] if layout.zero else (),
        "sequence_parallel": (not layout.sequence_parallel,),
        "context": CONTEXTS if layout.cp > 1 else (),
        "recompute": RECOMPUTES,
        "offload": OFFLOADS,
        "micro_batch": (micro * 2, micro // 2),
    }
    for key, options in values.items():
        for value in options:
            if value != getattr(layout, key) and (value != 0 or isinstance(value, bool)):
                yield _words(layout, key, value), dataclasses.replace(layout, **{key: value})


def _moved_data(layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Half the shards for twice the replicas, and the other way."""
    for giver, taker in (("dp_shard", "dp_replicate"), ("dp_replicate", "dp_shard")):
        if getattr(layout, giver) % 2 == 0:
            changes = {giver: getattr(layout, giver) // 2, taker: getattr(layout, taker) * 2}
            yield _words(layout, taker, changes[taker]), dataclasses.replace(layout, **changes)


def _moved_degree(layout: Layout, axis: str) -> Iterator[tuple[str, Layout]]:
    """An axis doubled at the cost of data parallelism, and halved in favour of it."""
    degree = getattr(layout, axis)
    for data in ("dp_shard", "dp_replicate"):
        if getattr(layout, data) % 2 == 0:
            changes = {axis: degree * 2, data: getattr(layout, data) // 2}
            yield _words(layout, axis, degree * 2), dataclasses.replace(layout, **changes)
            break
    if degree % 2 == 0:
        data = "dp_replicate" if layout.dp_replicate > 1 and layout.dp_shard == 1 else "dp_shard"
        changes = {axis: degree // 2, data: getattr(layout, data) * 2}
        yield _words(layout, axis, degree // 2), dataclasses.replace(layout, **changes)


def _other_schedules(job: Job, layout: Layout) -> Iterator[tuple[str, Layout]]:
    for name in reach_of(job).schedules:
        if name != layout.schedule:
            stages = 2 if name in V_SCHEDULES or name == "interleaved" else 1
            changes: dict[str, Any] = {"schedule": name, "virtual_stages": stages}
            yield _words(layout, "schedule", name), dataclasses.replace(layout, **changes)
    if layout.schedule == "interleaved" and isinstance(job.model, DecoderModel):
        choices = virtual_stage_choices(job.model.num_layers, layout.pp)
        for stages in choices:
            if stages in (layout.virtual_stages * 2, layout.virtual_stages // 2):
                words = _words(layout, "virtual_stages", stages)
                yield words, dataclasses.replace(layout, virtual_stages=stages)


def _words(layout: Layout, key: str, value: Any) -> str:
    before = getattr(layout, key)
    shown = str(value).lower() if isinstance(value, bool) else value
    return f"{key}={shown}" if isinstance(before, bool) else f"{key}={shown} instead of {before}"


def _consistent(job: Job, layout: Layout) -> Layout:
    """Settings that a changed degree leaves without effect step back; shards get a ZeRO stage."""
    changes: dict[str, Any] = {}
    if layout.tp == 1:
        changes["sequence_parallel"] = False
    if layout.pp == 1:
        changes |= {"schedule": "1f1b", "virtual_stages": 1}
    if layout.cp == 1:
        changes["context"] = "ring"
    if layout.dp_shard * layout.cp == 1:
        changes["zero"] = 0
    elif layout.dp_shard > 1 and layout.zero == 0:
        changes["zero"] = 1
    share = -(-job.train.global_batch // layout.data_degree)
    if layout.micro_batch and layout.micro_batch > share:
        changes["micro_batch"] = share
    return dataclasses.replace(layout, **changes)


def explain_neighbours(best: Prediction, by: By = "time") -> list[str]:
    """A sentence for each neighbour that lost, those that do not fit first."""
    near = list_neighbours(best.job, best.layout)
    flat = predict_layouts(best.job, [layout for _, layouts in near for layout in layouts])
    told, place = [], 0
    for change, layouts in near:
        others = flat[place : place + len(layouts)]
        place += len(layouts)
        other = min(others, key=lambda o: (not o.fits, _score(o, by) if o.fits else o.peak_bytes))
        words = change
        if other.layout.micro_batch != best.layout.micro_batch and not change.startswith("micro_batch"):
            words += f" (micro_batch={other.layout.micro_batch})"
        told.append((other, f"{words}: {compare(best, other, by)}"))
    told.sort(key=lambda pair: (pair[0].fits, pair[0].step_s))
    return [sentence for _, sentence in told]


def _score(prediction: Prediction, by: By) -> float:
    """What the ranking makes small."""
    if by == "memory":
        return prediction.peak_bytes
    return prediction.step_s * (prediction.layout.world_size if by == "cost" else 1)


def compare(best: Prediction, other: Prediction, by: By = "time") -> str:
    """What is worse with the other one: memory that is not there, or the parts that take longer."""
    if not other.fits:
        return other.shortage
    change, more = other.step_s / best.step_s - 1, other.peak_bytes - best.peak_bytes
    if abs(more) < SAME * best.peak_bytes and (by == "memory" or abs(change) < SAME):
        return "the same time and memory" if abs(change) < SAME else f"the same memory, {change:+.1%} time"
    if by == "memory" and more > 0:
        return f"{format_bytes(more)} more memory"
    if abs(change) < SAME:
        return f"the same time, {format_bytes(abs(more))} {'more' if more > 0 else 'less'} memory"
    if by == "memory":
        return f"{format_bytes(-more)} less memory, {change:+.1%} time"
    if change < 0:
        devices = other.layout.world_size / best.layout.world_size
        if by == "cost" and devices * (1 + change) > 1:
            return f"{devices * (1 + change) - 1:.1%} more device time"
        return f"{-change:.1%} faster, {format_bytes(other.peak_bytes)} a device"
    return f"{change:.1%} slower: {describe_parts(best, other)}"


def describe_parts(best: Prediction, other: Prediction, most: int = 2) -> str:
    """The parts that differ most, longer ones first."""
    differences = part_differences(best, other)
    large = sorted(differences.items(), key=lambda item: -item[1])
    shown = [(name, value) for name, value in large if value > 0.02 * abs(large[0][1])][:most]
    return ", ".join(f"{format_seconds(value)} more {name}" for name, value in shown)


def part_differences(best: Prediction, other: Prediction) -> dict[str, float]:
    """Seconds that each part of the other step takes beyond the best one's."""
    names = [*best.breakdown_s, *(n for n in other.breakdown_s if n not in best.breakdown_s)]
    return {n: other.breakdown_s.get(n, 0.0) - best.breakdown_s.get(n, 0.0) for n in names}
