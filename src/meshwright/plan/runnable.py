"""Every layout that this version runs on the job's cluster, predicted to the byte and ranked.

``choose`` takes the shortest way to one good layout; here nothing that runs is left out, so that a few of
the best can be tried. What runs is the legality table's business: an axis that is built is in, by itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.plan.choose import Candidate, evaluate, settle_layout
from meshwright.plan.estimate.grid import CONTEXTS, RECOMPUTES
from meshwright.plan.search.enumerate import world_sizes
from meshwright.spec.job import Job
from meshwright.spec.layout import AXES, Layout
from meshwright.spec.legality import find_problems, with_layout
from meshwright.spec.model import DecoderModel
from meshwright.spec.numbers import divisors, split_ranks

ZERO_STAGES = (1, 2, 3)


def rank_runnable(job: Job, pins: Mapping[str, Any]) -> list[Candidate]:
    """Layouts that run and fit, the shortest predicted step first.

    Args:
        job: With ``layout.mode=auto``.
        pins: Keys of the layout that keep their value.
    """
    found: dict[Layout, Candidate] = {}
    for layout in _list_layouts(job, pins):
        if find_problems(with_layout(job, layout)):
            continue
        for settled in _with_micro_batches(job, layout, open_="micro_batch" not in pins):
            if settled in found or find_problems(with_layout(job, settled)):
                continue
            candidate = evaluate(job, settled)
            if candidate.fits:
                found[settled] = candidate
    return sorted(found.values(), key=lambda c: (c.time.total_s, c.ledger.peak_bytes))


def _list_layouts(job: Job, pins: Mapping[str, Any]) -> Iterator[Layout]:
    """Degrees over even parts of the cluster, crossed with the settings that are open."""
    modes = (pins["recompute"],) if "recompute" in pins else RECOMPUTES
    sequence = (pins["sequence_parallel"],) if "sequence_parallel" in pins else (False, True)
    contexts = (pins["context"],) if "context" in pins else CONTEXTS
    for world in world_sizes(job):
        for named in _list_degrees(job, pins, world):
            if named["dp_replicate"] * named["dp_shard"] > job.train.global_batch:
                continue  # legal, but some ranks would only pad
            stages = _list_stages(pins, named)
            for zero, mode, parts, context in itertools.product(stages, modes, sequence, contexts):
                idle = (parts and named["tp"] == 1) or (context != "ring" and named["cp"] == 1)
                if not idle:
                    settings = {"zero": zero, "recompute": mode, "sequence_parallel": parts}
                    yield dataclasses.replace(job.layout, mode="given", context=context, **named, **settings)


def _list_degrees(job: Job, pins: Mapping[str, Any], world: int) -> Iterator[dict[str, Any]]:
    """Degrees of all axes; experts are whole, dealt over as many of the ranks as divide their number."""
    experts = job.model.num_experts or 1 if isinstance(job.model, DecoderModel) else 1
    for degrees in split_ranks(world, len(AXES)):
        named: dict[str, Any] = dict(zip(AXES, degrees, strict=True))
        ranks = named["dp_shard"] * named["cp"] * named["tp"]
        for ep in (pins["ep"],) if "ep" in pins else divisors(math.gcd(experts, ranks)):
            yield named | {"ep": ep}


def _list_stages(pins: Mapping[str, Any], named: Mapping[str, int]) -> tuple[int, ...]:
    """ZeRO stages; ranks that share a sequence alone may keep the state whole."""
    if "zero" in pins:
        return (pins["zero"],)
    if named["dp_shard"] > 1:
        return ZERO_STAGES
    return (0, *ZERO_STAGES) if named["cp"] > 1 else (0,)


def _with_micro_batches(job: Job, layout: Layout, open_: bool) -> Iterator[Layout]:
    """The largest micro-batch that fits, and half of it: the larger is not always the faster."""
    largest = settle_layout(job, layout)
    yield largest
    size = largest.micro_batch or 1
    if open_ and size > 1:
        yield settle_layout(job, dataclasses.replace(layout, micro_batch=size // 2))
