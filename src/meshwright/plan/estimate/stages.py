"""Classes of pipeline ranks (first, middle, last): their layers and in-flight micro-batches, on columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.plan.estimate.grid import Flags, Floats, Grid, Ints
from meshwright.schedule.pipeline.closed_forms import CODES, peak_in_flight
from meshwright.spec.model import DecoderModel

CLASSES = ("first", "middle", "last")
V_SHAPED = (CODES["zbv"], CODES["dualpipe-v"])
"""Schedules whose first rank has both ends of the model."""


@dataclass(frozen=True)
class Stage:
    """One class of pipeline ranks; one element per layout."""

    name: str
    exists: Flags
    layers: Floats
    expert_layers: Floats
    """The number of them with routed experts."""
    embeds: Flags
    """Whether it has the embedding."""
    heads: Flags
    """Whether it has the final norm, the head and the loss."""
    in_flight: Floats
    """In-flight micro-batches at the peak."""

    @property
    def dense_layers(self) -> Floats:
        """Layers with a dense feed-forward."""
        return self.layers - self.expert_layers


def split_stages(
    model: DecoderModel, grid: Grid, global_batch: int, given: tuple[Ints, Ints, Ints] | None = None
) -> tuple[Stage, Stage, Stage]:
    """The three classes. A single stage is `first`; of two, `middle` does not exist.

    Layers split evenly where they can. Else the embedding and the head count as a layer each, as Megatron
    (`account_for_embedding_in_pipeline_split`), DeepSpeed (`type:transformer|embedding`) and torchtitan
    split: then the first and last stage have one layer less. ``given`` replaces these layers of the first,
    the middle and the last stage.
    """
    total = model.num_layers
    chunks = grid.pp * grid.virtual_stages
    even = total % chunks == 0
    units = -(-(total + 2) // chunks) * grid.virtual_stages
    single = grid.pp == 1
    middle = np.where(even, total // grid.pp, np.minimum(units, total))
    first = np.where(single, total, np.where(even, middle, np.maximum(middle - 1, 0)))
    last = np.where(even, middle, np.clip(total - first - middle * (grid.pp - 2), 0, total))
    first, middle, last = given or (first, middle, last)
    micro_batches = grid.micro_batches(global_batch)
    v_shaped = np.isin(grid.schedule, V_SHAPED)
    dense = min(model.dense_layers, total) if model.num_experts else total
    dense_first = np.where(single, dense, np.minimum(dense, first / grid.virtual_stages))
    dense_last = np.clip(dense - (total - last), 0, last)
    dense_middle = np.clip(dense - first - middle * np.maximum(grid.pp - 3, 0), 0, middle)
    if not model.num_experts:
        dense_first, dense_middle, dense_last = first, middle, last
    counts = (first, first - dense_first), (middle, middle - dense_middle), (last, last - dense_last)
    ranks = np.zeros_like(grid.pp), np.minimum(1, grid.pp - 1), grid.pp - 1
    exists = np.ones(len(grid), dtype=np.bool_), grid.pp > 2, ~single
    none = np.zeros(len(grid), dtype=np.bool_)
    embeds = exists[0], none, none
    heads = single | v_shaped, none, ~single & ~v_shaped
    made = [
        Stage(
            name,
            exists[index],
            counts[index][0].astype(np.float64),
            counts[index][1].astype(np.float64),
            embeds[index],
            heads[index],
            count_in_flight(grid, ranks[index], micro_batches),
        )
        for index, name in enumerate(CLASSES)
    ]
    return made[0], made[1], made[2]


def count_in_flight(grid: Grid, rank: Ints, micro_batches: Ints) -> Floats:
    """In-flight micro-batches of a pipeline rank at its peak, all its layers counted as one stage.

    By the closed forms of the schedules.
    """
    interleaved, v_shaped = grid.schedule == CODES["interleaved"], np.isin(grid.schedule, V_SHAPED)
    stages = np.where(interleaved, grid.virtual_stages, np.where(v_shaped, 2, 1))
    held = peak_in_flight(grid.schedule, rank, grid.pp, grid.virtual_stages, micro_batches) / stages
    return np.where(grid.pp == 1, 1.0, held)
