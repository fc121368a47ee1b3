"""Assigns layers to pipeline stages so that the slowest rank is as fast as possible.

The unit of cost is one block. The costs of the embedding (first stage) and the head (last stage) are
rounded to :data:`GRAIN`, so that there are few distinct splits.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.plan.estimate.grid import Floats, Grid
from meshwright.plan.estimate.stages import V_SHAPED
from meshwright.schedule.pipeline.actions import loop_ranks, v_shaped_ranks

GRAIN = 1 / 8
"""Rounding of the costs of embedding and head, in blocks."""
SLACK = 1e-9
"""Tolerance of floating-point sums, in blocks."""


def assign_layers(layers: int, stage_ranks: Sequence[int], embedding: float, head: float) -> tuple[int, ...]:
    """Layers of each stage. Each layer goes to the rank with the least work, and there to its fastest stage.

    Ties go to the latest stage: late stages hold the fewest in-flight micro-batches.

    Args:
        layers: Layers of the model; each stage has at least one.
        stage_ranks: The pp_rank of each stage.
        embedding: Cost of the embedding in blocks; it is on the first stage.
        head: Cost of the head in blocks; it is on the last stage.
    """
    rounded = (round(cost / GRAIN) * GRAIN for cost in (embedding, head))
    return _assign(layers, tuple(stage_ranks), *rounded)


@functools.lru_cache(maxsize=65536)
def _assign(layers: int, stage_ranks: tuple[int, ...], embedding: float, head: float) -> tuple[int, ...]:
    costs = stage_costs([1] * len(stage_ranks), embedding, head)
    stages: list[list[tuple[float, int]]] = [[] for _ in range(max(stage_ranks) + 1)]
    for stage, rank in enumerate(stage_ranks):
        heapq.heappush(stages[rank], (costs[stage], -stage))
    loads = rank_costs(costs, stage_ranks)
    ranks = [(loads[rank], *of_rank[0], rank) for rank, of_rank in enumerate(stages)]
    heapq.heapify(ranks)
    assigned = [1] * len(stage_ranks)
    for _ in range(layers - len(stage_ranks)):
        load, cost, stage, rank = ranks[0]
        assigned[-stage] += 1
        heapq.heapreplace(stages[rank], (cost + 1, stage))
        heapq.heapreplace(ranks, (load + 1, *stages[rank][0], rank))
    return tuple(assigned)


class HeldLayers(NamedTuple):
    """Layers of one pipeline rank, one value per layout."""

    layers: Floats
    fewest: Floats
    """Layers of its smallest stage."""


def count_end_layers(
    grid: Grid, layers: int, embedding: Floats, head: Floats
) -> tuple[HeldLayers, HeldLayers]:
    """Layers that :func:`assign_layers` gives the first and the last pipeline rank.

    Args:
        grid: Layouts with a pipeline.
        layers: Layers of the model.
        embedding: Cost of the embedding in blocks.
        head: Cost of the head in blocks.
    """
    v_shaped = np.isin(grid.schedule, V_SHAPED)
    grains = [np.round(cost / GRAIN).astype(np.int64) for cost in (embedding, head)]
    keys = np.stack((grid.pp, np.where(v_shaped, 2, grid.virtual_stages), v_shaped.astype(np.int64), *grains))
    distinct, indices = np.unique(keys, axis=1, return_inverse=True)
    rows = []
    for pp, stages, is_v_shaped, first, last in distinct.T.tolist():
        stage_ranks = v_shaped_ranks(pp) if is_v_shaped else loop_ranks(pp, stages)
        split = _assign(layers, stage_ranks, first * GRAIN, last * GRAIN)
        ends = [
            [n for n, home in zip(split, stage_ranks, strict=True) if home == rank] for rank in (0, pp - 1)
        ]
        rows.append([number for held in ends for number in (sum(held), min(held))])
    found = np.array(rows, dtype=np.float64).T[:, indices.reshape(-1)]
    return HeldLayers(found[0], found[1]), HeldLayers(found[2], found[3])


def stage_costs(layers: Sequence[int], embedding: float, head: float) -> list[float]:
    """Cost of each stage in blocks."""
    costs = [float(count) for count in layers]
    costs[0] += embedding
    costs[-1] += head
    return costs


def rank_costs(stages: Sequence[float], stage_ranks: Sequence[int]) -> list[float]:
    """Cost of the stages of each pipeline rank."""
    loads = [0.0] * (max(stage_ranks) + 1)
    for cost, rank in zip(stages, stage_ranks, strict=True):
        loads[rank] += cost
    return loads


def slowest_load(grid: Grid, layers: int, embedding: Floats, head: Floats) -> Floats:
    """Cost of the slowest rank in blocks, with the layers of :func:`assign_layers`.

    The least load L for which all layers fit: floor(L) layers on an inner rank, floor(L - embedding) on the
    first, floor(L - head) on the last, and at least one per stage. L is an integer, or an integer plus the
    cost of the embedding or the head. Costs are not rounded here.
    """
    folded = np.isin(grid.schedule, V_SHAPED)
    stages = np.where(folded, 2, grid.virtual_stages)
    # In a V-shaped pipeline the first rank has both embedding and head.
    first, last = np.where(folded, embedding + head, embedding), np.where(folded, 0.0, head)
    least = np.maximum(stages + np.maximum(first, last), (layers + first + last) / grid.pp)

    def room(load: Floats) -> Floats:
        on_first, on_last = (np.maximum(np.floor(load - end + SLACK), stages) for end in (first, last))
        return on_first + on_last + (grid.pp - 2) * np.floor(load + SLACK)

    best = np.full(len(grid), np.inf)
    for end in (np.zeros_like(first), first, last):
        base = np.ceil(least - end - SLACK) + end
        for load in (base, base + 1.0):
            best = np.where((load < best) & (room(load) >= layers), load, best)
    return best
