"""What a layout that does not fit could change: every change priced by the ledger, the cheapest first.

``search/rescue`` advises on plans, by estimates; here the layout runs, so each change runs too, and is
predicted to the byte.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_bytes, format_seconds
from meshwright.plan.choose import USABLE_MEMORY, Candidate, Search, evaluate
from meshwright.plan.search.predict import overrides_from
from meshwright.plan.search.rescue import SHORTEST_SEQUENCE, single_changes, with_seq_len
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.legality import find_problems, with_layout
from meshwright.spec.model import DecoderModel, ResNetModel

MOST_REMEDIES = 3
LEAST_LESS = 0.1
"""By how much less a change must need where the prediction said that there is room."""


@dataclass(frozen=True)
class Remedy:
    """A change that fits, with its price."""

    overrides: str
    """To be pasted behind the job; they name the whole layout, so that nothing else is chosen again."""
    peak_bytes: int
    step_s: float


def room_to_plan_for(
    predicted_bytes: int, room_bytes: int, asked_bytes: int | None, live_bytes: int | None
) -> int:
    """What a change may need, after a rank ran out.

    The usable share of what was there, or of what the live tensors and the one asked for in vain came to: the
    rest was lost to the allocator. Where less was predicted than that, something was not predicted: then less
    than predicted, by what was asked for or a tenth.
    """
    reached = room_bytes if live_bytes is None else min(room_bytes, live_bytes + (asked_bytes or 0))
    usable = int(reached * USABLE_MEMORY)
    if predicted_bytes > usable:
        return usable
    return predicted_bytes - max(asked_bytes or 0, int(predicted_bytes * LEAST_LESS))


def cheapest_changes(job: Job, room_bytes: int) -> list[Remedy]:
    """The changes of the job's layout that run, and fit into the room; at most three, the fastest first.

    Shorter samples, which change what is trained, only where the layout has fewer than three.

    Args:
        job: With its layout settled, micro-batch included.
        room_bytes: What the predicted peak may be.
    """
    found: dict[frozenset[str], Remedy] = {}
    for changed in _changed_layouts(job):
        candidate = _largest_that_fits(job, changed, room_bytes)
        if candidate is None:
            continue
        keys = _differences(job.layout, candidate.layout)
        remedy = _remedy(job.layout, candidate)
        if keys and (keys not in found or remedy.step_s < found[keys].step_s):
            found[keys] = remedy
    # A change that contains another one which fits by itself comes behind those that do not.
    order = sorted(found, key=lambda keys: (any(other < keys for other in found), found[keys].step_s))
    best = sorted((found[keys] for keys in order[:MOST_REMEDIES]), key=lambda r: r.step_s)
    return best + _shorter(job, room_bytes)[: MOST_REMEDIES - len(best)]


def _changed_layouts(job: Job) -> Iterator[Layout]:
    """The layout itself, whose micro-batch is still open, and with one thing changed, or with two."""
    layout = job.layout
    yield layout
    for _, keys in single_changes(layout):
        if "offload" in keys and job.cluster.device == "cpu":
            continue  # a core's state lies in the host's memory already
        changed = {**keys, "stage_layers": None if "pp" in keys else layout.stage_layers}
        yield dataclasses.replace(layout, **changed)
        for mode in ("selective", "full"):
            both: dict[str, Any] = {"recompute": mode, **changed}
            yield dataclasses.replace(layout, **both)


def _largest_that_fits(job: Job, layout: Layout, room_bytes: int) -> Candidate | None:
    """With the largest micro-batch, up to the present one, with which it runs and fits."""
    if layout.world_size > job.cluster.world_size:
        return None  # ranks that share a device share its memory
    share = -(-job.train.global_batch // layout.data_degree)
    evened = {-(-share // count) for count in range(1, share + 1)}
    tries = [
        dataclasses.replace(layout, micro_batch=n) for n in sorted(evened) if n <= (layout.micro_batch or n)
    ]
    legal = [tried for tried in tries if not find_problems(with_layout(job, tried))]

    def peak(tried: Layout) -> int:
        return evaluate(job, tried).ledger.first_peak_bytes

    fitting = bisect.bisect_right(legal, room_bytes, key=peak)
    return evaluate(job, legal[fitting - 1]) if fitting else None


def _differences(one: Layout, other: Layout) -> frozenset[str]:
    names = [field.name for field in dataclasses.fields(Layout)]
    return frozenset(name for name in names if getattr(one, name) != getattr(other, name))


def _remedy(before: Layout, candidate: Candidate, also: str = "") -> Remedy:
    named = overrides_from(before, candidate.layout) + also
    return Remedy(named, candidate.ledger.first_peak_bytes, candidate.time.total_s)


def _shorter(job: Job, room_bytes: int) -> list[Remedy]:
    """The longest sequence that fits, of those that are halves."""
    if isinstance(job.model, ResNetModel):
        return []
    length = job.data.seq_len // 2
    while length >= SHORTEST_SEQUENCE:
        short = with_seq_len(job, length)
        candidate = evaluate(short, job.layout)
        if candidate.ledger.first_peak_bytes <= room_bytes and not find_problems(short):
            return [_remedy(job.layout, candidate, f" data.seq_len={length}")]
        length //= 2
    return []


def _elsewhere(job: Job) -> str:
    """That a preset of a cluster can be named, where the model does not fit this machine."""
    named = job.cluster.preset == "local" and isinstance(job.model, DecoderModel)
    return "; plan it for a cluster with, say, --on 8x8xh100-sxm" if named else ""


def require_fit(job: Job, search: Search) -> Candidate:
    """The best candidate, or the error that says by how much nothing fits."""
    if search.fitting:
        return search.fitting[0]
    closest = min(search.candidates, key=lambda c: c.ledger.first_peak_bytes)
    usable = int(job.cluster.memory_bytes * USABLE_MEMORY)
    largest = max(closest.ledger.lines, key=lambda line: line.bytes)
    changes = cheapest_changes(with_layout(job, closest.layout), usable)
    prices = [f"{format_bytes(c.peak_bytes)}, {format_seconds(c.step_s)} a step" for c in changes]
    milder = "".join(f"{c.overrides} ({price}), " for c, price in zip(changes, prices, strict=True))
    raise UserError(
        Problem(
            code="plan-nothing-fits",
            path=job.name,
            rule=f"does not fit: {closest.name} with micro_batch={closest.layout.micro_batch} needs "
            f"{format_bytes(closest.ledger.first_peak_bytes)} a device, {format_bytes(usable)} of "
            f"{format_bytes(job.cluster.memory_bytes)} are usable; the largest line is {largest.name} "
            f"with {format_bytes(largest.bytes)}",
            fix=f"Use {milder}a smaller model{'' if job.unit == 'images' else ' or data.seq_len'}, "
            f"or devices with more memory{_elsewhere(job)}",
        )
    )
