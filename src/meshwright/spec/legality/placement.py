"""Rules of rank placement (``layout.placement``): a list has one slot per rank, each slot once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from meshwright.core.errors import Problem
from meshwright.core.units import format_plural
from meshwright.spec.job import Job
from meshwright.spec.legality.rule import Rule

PATH = "layout.placement"
MOST_SHOWN = 16
"""Slots of a list that a message shows."""


def count_slots_per_node(job: Job) -> int:
    """Device slots of each node: its devices, or as many as its ranks where ranks share CPU cores."""
    cluster, ranks = job.cluster, job.layout.world_size
    return max(cluster.devices_per_node, -(-ranks // cluster.nodes))


def check_given(job: Job) -> Problem | None:
    """A list belongs to one layout."""
    if isinstance(job.layout.placement, str) or job.layout.mode == "given":
        return None
    rule = "is a list of slots, which needs a given layout: the planner chooses the number of ranks"
    return _problem(job, "layout-placement-auto", rule, "Set the degrees, too, or use auto or rank-order")


def check_length(job: Job) -> Problem | None:
    """Every rank has a slot."""
    slots, ranks = job.layout.placement, job.layout.world_size
    if isinstance(slots, str) or job.layout.mode == "auto" or len(slots) == ranks:
        return None
    rule = f"has {format_plural(len(slots), 'slot')}; the layout has {format_plural(ranks, 'rank')}"
    return _problem(job, "layout-placement-length", rule, "Name one slot per rank, in the order of ranks")


def check_slots(job: Job) -> Problem | None:
    """Slots exist, and no two ranks have the same one."""
    slots = job.layout.placement
    if isinstance(slots, str) or job.layout.mode == "auto":
        return None
    rule = find_slot_error(slots, job.cluster.nodes, count_slots_per_node(job))
    if rule is None:
        return None
    last = job.cluster.nodes * count_slots_per_node(job) - 1
    return _problem(job, "layout-placement-slots", rule, f"Use different slots from 0 to {last}")


def find_slot_error(slots: Sequence[int], nodes: int, per_node: int) -> str | None:
    """Why some ranks cannot have these slots; None if they can."""
    total = nodes * per_node
    outside = [slot for slot in slots if not 0 <= slot < total]
    if outside:
        return f"names slot {outside[0]}; there are {total} ({nodes} nodes x {per_node})"
    slot, times = Counter(slots).most_common(1)[0] if slots else (0, 0)
    return f"names slot {slot} for {times} ranks" if times > 1 else None


def _problem(job: Job, code: str, rule: str, fix: str) -> Problem:
    slots = job.layout.placement
    shown = slots if isinstance(slots, str) else str(list(slots[:MOST_SHOWN]))
    return Problem(code, rule, path=PATH, value=shown, fix=fix)


RULES: tuple[Rule, ...] = (
    Rule("layout-placement-auto", "A list of slots in `placement` needs a given layout.", check_given),
    Rule("layout-placement-length", "`placement` has one slot per rank.", check_length),
    Rule(
        "layout-placement-slots",
        "The slots of `placement` exist (`nodes` x `devices_per_node`), and each rank has its own.",
        check_slots,
    ),
)
