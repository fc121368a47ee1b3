"""The legal layout that is nearest to one that is not, among all that can be planned.

Degrees are changed as little as possible (distance: doublings and halvings), the number of ranks is kept
where that can be, and the settings that hang on degrees follow them. What runs today is another question:
``legality.nearest_legal_layout``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from meshwright.spec.axis_rules import count_micro_batches
from meshwright.spec.job import Job
from meshwright.spec.layout import V_SCHEDULES, Layout
from meshwright.spec.legality import find_problems, with_layout
from meshwright.spec.model import DecoderModel
from meshwright.spec.numbers import divisors

REACH = 8
"""Degrees more than this many times larger or smaller than the asked ones are not looked at, but for 1."""
MOST = 6
"""Values looked at for one axis."""


def nearest_planned_layout(job: Job) -> Layout:
    """The nearest layout that no rule forbids; the job's other mistakes are not looked at."""
    asked, model = job.layout, job.model
    if not isinstance(model, DecoderModel):
        return Layout(mode="given", dp_replicate=min(asked.world_size, job.cluster.world_size))
    choices = {
        "tp": _near(divisors(model.num_heads), asked.tp),
        "cp": _near(
            [d for d in divisors(job.data.seq_len) if job.data.seq_len % (2 * d) == 0 or d == 1], asked.cp
        ),
        "pp": _near(range(1, min(model.num_layers, 2 * asked.pp) + 1), asked.pp),
        "ep": _near(divisors(model.num_experts or 1), asked.ep),
        "etp": _near(divisors(model.expert_width), asked.etp) if model.num_experts else [1],
    }
    found: list[tuple[float, Layout]] = []
    for degrees in itertools.product(*choices.values()):
        cut = dict(zip(choices, degrees, strict=True))
        found += [(_distance(asked, layout), layout) for layout in _with_data(job, cut)]
    found.sort(key=lambda pair: pair[0])
    legal = (layout for _, layout in found if _is_legal(with_layout(job, layout)))
    return next(legal, Layout(mode="given", recompute=asked.recompute))


def _near(values: range | list[int], wanted: int) -> list[int]:
    """Few of the values, nearest first, and 1 in any case."""
    near = [v for v in values if v == 1 or wanted / REACH <= v <= wanted * REACH]
    near.sort(key=lambda v: _doublings(wanted, v))
    return list(dict.fromkeys([*near[:MOST], 1]))


def _with_data(job: Job, cut: dict[str, int]) -> list[Layout]:
    """The degrees of data that keep the ranks, or as many as the cluster holds; state is held either way."""
    asked = job.layout
    ranks = min(asked.world_size, job.cluster.world_size)
    data = ranks // (cut["pp"] * cut["cp"] * cut["tp"])
    if data < 1:
        return []
    shards = [math.gcd(asked.dp_shard, data), cut["ep"] * cut["etp"]]
    if asked.dp_shard > 1 or asked.zero:
        shards.append(data)
    return [
        _settle(job, _replace(asked, {"mode": "given", **cut, "dp_shard": s, "dp_replicate": data // s}))
        for s in dict.fromkeys(shards)
        if data % s == 0
    ]


def _replace(layout: Layout, changes: dict[str, Any]) -> Layout:
    return dataclasses.replace(layout, **changes)


def _settle(job: Job, layout: Layout) -> Layout:
    """What hangs on the degrees follows them."""
    changes: dict[str, Any] = {}
    sharded = layout.dp_shard * layout.cp > 1
    zero = (layout.zero or (3 if layout.dp_shard > 1 else 0)) if sharded else 0
    changes["zero"] = zero
    if layout.micro_batch is not None:
        changes["micro_batch"] = min(layout.micro_batch, -(-job.train.global_batch // layout.data_degree))
    if zero < 2:
        changes["accumulate"] = "sharded"
    if zero < 3:
        changes["prefetch"] = 1
    if layout.cp == 1:
        changes["context"] = "ring"
    if job.cluster.device == "cpu":
        changes["offload"] = "none"
    pieces = layout.tp * layout.cp
    changes["sequence_parallel"] = (
        layout.sequence_parallel and layout.tp > 1 and job.data.seq_len % pieces == 0
    )
    changes |= _settle_schedule(job, _replace(layout, changes))
    return _replace(layout, changes)


def _settle_schedule(job: Job, layout: Layout) -> dict[str, Any]:
    """The schedule where it can stay, else 1F1B."""
    plain: dict[str, Any] = {"schedule": "1f1b", "virtual_stages": 1}
    if layout.pp == 1 or not isinstance(job.model, DecoderModel):
        return plain
    if layout.schedule in V_SCHEDULES:
        return {"virtual_stages": 2} if 2 * layout.pp <= job.model.num_layers else plain
    if layout.schedule != "interleaved":
        return {"virtual_stages": 1}
    rounds = count_micro_batches(with_layout(job, layout))
    stages = min(max(layout.virtual_stages, 2), job.model.num_layers // layout.pp)
    if stages < 2 or (rounds is not None and rounds % layout.pp):
        return plain
    return {"virtual_stages": stages}


def _distance(asked: Layout, other: Layout) -> float:
    """How far apart two layouts are: doublings of each degree, of the ranks, and settings that changed."""
    axes = ("pp", "cp", "tp", "ep", "etp")
    apart = sum(_doublings(getattr(asked, a), getattr(other, a)) for a in axes)
    held = ("dp_replicate", "dp_shard")
    data = sum(_doublings(getattr(asked, a), getattr(other, a)) for a in held)
    ranks = _doublings(asked.world_size, other.world_size)
    kept = ("schedule", "virtual_stages", "context", "sequence_parallel", "zero", "micro_batch")
    changed = sum(bool(getattr(other, key) != getattr(asked, key)) for key in kept)
    return apart + 0.3 * data + 2 * ranks + 0.25 * changed


def _doublings(one: int, other: int) -> float:
    return abs(math.log2(other / one))


def _is_legal(job: Job) -> bool:
    return not any(p.path.startswith("layout") for p in find_problems(job, to_run=False))
