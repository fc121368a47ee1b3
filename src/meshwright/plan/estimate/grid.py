"""Many layouts of one job as numpy columns, so that formulas run over all of them at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from meshwright.spec.layout import SCHEDULES, Accumulate, Context, Layout, Offload, Recompute

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

RECOMPUTES: tuple[str, ...] = get_args(Recompute)
OFFLOADS: tuple[str, ...] = get_args(Offload)
CONTEXTS: tuple[str, ...] = get_args(Context)
ACCUMULATES: tuple[str, ...] = get_args(Accumulate)
CODED = {
    "schedule": SCHEDULES,
    "recompute": RECOMPUTES,
    "offload": OFFLOADS,
    "context": CONTEXTS,
    "accumulate": ACCUMULATES,
}
"""Keys whose column holds the position of the value."""


@dataclass(frozen=True)
class Grid:
    """Layouts as columns, one element per layout; a choice is its index in the tuples above."""

    pp: Ints
    dp_replicate: Ints
    dp_shard: Ints
    cp: Ints
    tp: Ints
    ep: Ints
    etp: Ints
    zero: Ints
    accumulate: Ints
    sequence_parallel: Flags
    schedule: Ints
    virtual_stages: Ints
    context: Ints
    micro_batch: Ints
    recompute: Ints
    offload: Ints
    prefetch: Ints
    backup_replicas: Ints

    def __len__(self) -> int:
        return len(self.pp)

    @property
    def world_size(self) -> Ints:
        """Ranks of each layout."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def has_unsharded_layers(self) -> Flags:
        """Layouts whose layers are not sharded: pp, tp and cp of 1, ZeRO below 2.

        Only these run Triton blocks (``spec.execution.find_triton_obstacle``), and their compiled steps have
        their own memory ledger.
        """
        unsharded: Flags = (self.pp * self.tp * self.cp == 1) & (self.zero < 2)
        return unsharded

    @property
    def data_degree(self) -> Ints:
        """Data-parallel ranks, which read different samples."""
        slices: Ints = np.maximum(1, self.dp_replicate - self.backup_replicas)
        return slices * self.dp_shard

    def micro_batches(self, global_batch: int) -> Ints:
        """Micro-batches of a step on the rank with most samples."""
        share = -(-global_batch // self.data_degree)
        return -(-share // self.micro_batch)

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> Grid:
        """The columns of layouts whose micro-batch is settled."""
        columns: dict[str, npt.NDArray[Any]] = {}
        for field in dataclasses.fields(cls):
            values = [getattr(layout, field.name) for layout in layouts]
            if field.name in CODED:
                values = [CODED[field.name].index(value) for value in values]
            kind = np.bool_ if field.name == "sequence_parallel" else np.int64
            columns[field.name] = np.array([1 if v is None else v for v in values], dtype=kind)
        return cls(**columns)

    def take(self, places: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Grid:
        """Some of the layouts."""
        return Grid(**{f.name: getattr(self, f.name)[places] for f in dataclasses.fields(self)})

    def layout(self, index: int) -> Layout:
        """One layout."""
        values: dict[str, object] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)[index]
            if field.name in CODED:
                values[field.name] = CODED[field.name][int(value)]
            else:
                values[field.name] = bool(value) if value.dtype == np.bool_ else int(value)
        return Layout(mode="given", **values)  # type: ignore[arg-type]
