"""Searches the placement of ranks (topology-aware rank placement): which slot of the cluster each rank has.

1. **Axis orders.** Ranks are numbered with tp innermost. Every order of the axes above 1 is tried: the
   innermost ones are inside a node, the others cross nodes and racks. Where there are more slots than ranks,
   nodes may also be filled in part.
2. **Swaps.** From the best of these, pairs of ranks on different nodes are swapped as long as that helps.

A placement is judged by the predicted step (``plan.time``), which includes the traffic by axis, what overlaps
with compute, and the tiers of the cluster. Rank order is kept unless another placement is faster.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator

import numpy as np

from meshwright.core.units import format_bytes, format_seconds
from meshwright.layout.hierarchy import find_hierarchy
from meshwright.layout.placement import RANK_ORDER, Slots, given_slots, normalize_slots, tier_of
from meshwright.plan.estimate.grid import Floats, Grid, Ints
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.predict import Prediction, place_ranks
from meshwright.plan.search.find import SearchResult
from meshwright.plan.time.engine import estimate_step
from meshwright.plan.time.spans import find_spans, list_members
from meshwright.spec.job import Job
from meshwright.spec.layout import AXES, Layout, Placement
from meshwright.spec.legality.placement import count_slots_per_node
from meshwright.spec.legality.table import with_layout
from meshwright.spec.model import DecoderModel

GAIN = 0.01
"""Share of a step by which another placement must be faster than rank order: the model is not finer."""
ROUNDING = 1e-6
"""Share of a step by which a swap must be faster."""
MOST_SWAPPED = 32
"""Ranks up to which pairs are swapped."""
MOST_ROUNDS = 16
"""Swaps at most."""
MOST_PLACED = 1
"""Layouts of a search whose ranks are placed; the others are compared in rank order."""
MOST_ELEMENTS = 2**20
"""Ranks of all placements that are judged at once."""
WORDS = {"node": "inside nodes", "rack": "between nodes", "spine": "between racks"}


def place_found(requested: Job, found: SearchResult) -> None:
    """Place the ranks of the layouts that a search found.

    Args:
        requested: The job as given, with its ``layout.placement``.
        found: Its layouts, best first. Their order does not change.
    """
    rule = requested.layout.placement
    for index, prediction in enumerate(found.best):
        kept = _with_rule(prediction, rule)
        if kept.job.cluster.nodes > 1 or not isinstance(rule, str):
            kept = _place(kept, search=index < MOST_PLACED)
        found.best[index] = kept


def _with_rule(prediction: Prediction, rule: Placement) -> Prediction:
    """The prediction with the ``layout.placement`` of the job: the search does not carry it."""
    layout = prediction.layout
    if layout.placement == rule:
        return prediction
    job = with_layout(prediction.job, dataclasses.replace(layout, placement=rule))
    return dataclasses.replace(prediction, job=job)


def _place(prediction: Prediction, search: bool) -> Prediction:
    rule = prediction.layout.placement
    if not isinstance(rule, str):
        slots = given_slots(prediction.layout)
        reason = "ranks are placed as given in the job (layout.placement)"
        return place_ranks(prediction, slots, f"{reason}: {describe_tiers(prediction, slots)}")
    if not search or prediction.layout.world_size == 1:
        return prediction
    tiers = describe_tiers(prediction, RANK_ORDER)
    if rule == "rank-order":
        return place_ranks(prediction, RANK_ORDER, f"ranks are placed in rank order, as given: {tiers}")
    if not isinstance(prediction.job.model, DecoderModel):
        return prediction
    if find_hierarchy(prediction.job) is not None:
        reason = f"ranks are placed in rank order for the hierarchical all-reduce: {tiers}"
        return place_ranks(prediction, RANK_ORDER, reason)
    found = PlacementSearch(prediction.job, prediction.micro_batches)
    slots = found.run()
    if slots == RANK_ORDER:
        among = f"no faster one among {found.tried} placements; " if found.tried > 1 else ""
        reason = f"ranks are placed in rank order: {among}{tiers}"
        return place_ranks(prediction, RANK_ORDER, reason)
    placed = place_ranks(prediction, slots, "")
    before, after = (format_seconds(one.step_s) for one in (prediction, placed))
    reason = f"ranks are not placed in rank order: {describe_tiers(prediction, slots)}"
    reason += f"; predicted step {after}, {before} in rank order"
    if prediction.traffic:
        what, before_bytes, after_bytes = _compare_crossing_bytes(prediction, slots)
        moved = f"{format_bytes(after_bytes)} per rank and step, {format_bytes(before_bytes)} in rank order"
        reason += f"; axes that cross {what} move {moved}"
    return dataclasses.replace(placed, placement_reason=reason)


def describe_tiers(prediction: Prediction, slots: Slots) -> str:
    """The tier that each axis crosses, as text."""
    by_tier: dict[str, list[str]] = {}
    for axis in _list_axes(prediction.layout):
        by_tier.setdefault(WORDS[tier_of(prediction.job, axis, slots)], []).append(axis)
    return ", ".join(f"{' and '.join(by_tier[w])} {w}" for w in WORDS.values() if w in by_tier)


def _compare_crossing_bytes(prediction: Prediction, slots: Slots) -> tuple[str, int, int]:
    """Bytes between racks, in rank order and as placed; between nodes, if no axis crosses racks there."""
    tiers: tuple[str, ...] = ("spine",)
    found = [count_crossing_bytes(prediction, one, tiers) for one in (RANK_ORDER, slots)]
    if found[0] > found[1]:
        return "racks", found[0], found[1]
    tiers = ("rack", "spine")
    found = [count_crossing_bytes(prediction, one, tiers) for one in (RANK_ORDER, slots)]
    return "nodes", found[0], found[1]


def count_crossing_bytes(prediction: Prediction, slots: Slots, tiers: Collection[str]) -> int:
    """Bytes of a step's collectives over axes that cross some tiers, on the rank with most."""
    rows = [row for row in prediction.traffic if row.phase == "step"]
    crossing = {axis for axis in {row.axis for row in rows} if tier_of(prediction.job, axis, slots) in tiers}
    of_ranks = [
        sum(row.bytes for row in rows if row.pp_rank in (None, pp_rank) and row.axis in crossing)
        for pp_rank in range(prediction.layout.pp)
    ]
    return max(of_ranks)


def _list_axes(layout: Layout) -> list[str]:
    """The axes above 1, innermost first."""
    return [axis for axis in reversed(AXES) if getattr(layout, axis) > 1]


class PlacementSearch:
    """The search for one layout."""

    def __init__(self, job: Job, micro_batches: int) -> None:
        """The search.

        Args:
            job: With a complete layout of a decoder.
            micro_batches: Micro-batches of one step.
        """
        self.job, self.layout = job, job.layout
        self.per_node = count_slots_per_node(job)
        samples = micro_batches * (job.layout.micro_batch or 1) * job.layout.data_degree
        self._workload = dataclasses.replace(Workload.of(job), global_batch=samples)
        self._members = list_members(job.layout)
        self.tried = 0
        """Placements that were judged; those that differ inside nodes only count once."""

    def run(self) -> Slots:
        """The placement with the shortest predicted step; empty for rank order."""
        candidates = self.list_axis_orders()
        steps = self.judge(candidates)
        index = int(np.argmin(np.round(steps / steps[0] / ROUNDING)))  # of equal ones, the first
        slots, step_s = candidates[index], float(steps[index])
        if self.layout.world_size <= MOST_SWAPPED:
            slots, step_s = self._swap(slots, step_s)
        is_faster = step_s < steps[0] * (1 - GAIN)
        return normalize_slots(int(slot) for slot in slots) if is_faster else RANK_ORDER

    def judge(self, candidates: Ints) -> Floats:
        """The predicted step of each placement, one per row; pipelines by the closed form of their bubble."""
        self.tried += len(candidates)
        rows = max(1, MOST_ELEMENTS // self.layout.world_size)
        parts = [candidates[first : first + rows] for first in range(0, len(candidates), rows)]
        found = []
        for part in parts:
            grid = Grid.of([self.layout]).take(np.zeros(len(part), dtype=np.int64))
            spans = find_spans(self.job, part, self._members)
            found.append(estimate_step(self._workload, grid, spans=spans).step_s)
        return np.concatenate(found)

    def list_axis_orders(self) -> Ints:
        """Placements by the order of axes, rank order first; one of those that assign the same nodes."""
        world = self.layout.world_size
        fewest = -(-world // self.job.cluster.nodes)
        candidates = [np.arange(world)]
        for position in self._list_positions():
            for used in range(self.per_node, fewest - 1, -1):
                node, device = np.divmod(position, used)
                candidates.append(node * self.per_node + device)
        rows = np.stack(candidates)
        _, first = np.unique(rows // self.per_node, axis=0, return_index=True)
        return rows[np.sort(first)]

    def _list_positions(self) -> Iterator[Ints]:
        """The position of each rank by every order of the axes above 1, outermost first."""
        axes = list(reversed(_list_axes(self.layout)))
        degrees = [getattr(self.layout, axis) for axis in axes]
        for order in itertools.permutations(range(len(axes))):
            numbered = np.arange(self.layout.world_size).reshape([degrees[axis] for axis in order])
            yield numbered.transpose(np.argsort(order)).reshape(-1)

    def _swap(self, slots: Ints, step_s: float) -> tuple[Ints, float]:
        """Swap the pair of ranks that helps most, until none does."""
        for _ in range(MOST_ROUNDS):
            nodes = slots // self.per_node
            first, second = np.triu_indices(len(slots), 1)
            apart = nodes[first] != nodes[second]
            first, second = first[apart], second[apart]
            if not len(first):
                break
            candidates = np.tile(slots, (len(first), 1))
            row = np.arange(len(first))
            candidates[row, first], candidates[row, second] = slots[second], slots[first]
            steps = self.judge(candidates)
            index = int(np.argmin(steps))
            if steps[index] >= step_s * (1 - ROUNDING):
                break
            slots, step_s = candidates[index], float(steps[index])
        return slots, step_s
