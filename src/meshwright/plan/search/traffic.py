"""What one rank of a layout moves in a step: by axis, operation and tier.

Bytes of a call are the larger of what the rank hands in and gets out; a send counts at the sender. These are
the collectives that the layout implies (Megatron's for tp, ZeRO's for dp_shard, ...), on the fullest rank.
For layouts that run today ``plan/comms.py`` has them exactly, bucket by bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.sizes import share_parameters
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.traffic import Traffic
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import Layout

WIRE_BYTES = 2
"""Bytes of an activation, or of a gathered weight, on the wire."""
GRADIENT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Moved(Traffic):
    """Calls of one operation on one axis in a step."""

    tier: str
    """The farthest that it reaches: `node`, `rack` or `spine`."""


def tier_of(cluster: Cluster, ranks: int, stride: int) -> str:
    """Where a group of ranks lies that are ``stride`` devices apart."""
    nodes = -(-ranks * stride // cluster.devices_per_node)
    if nodes <= 1:
        return "node"
    return "rack" if nodes <= (cluster.nodes_per_rack or cluster.nodes) else "spine"


def list_traffic(workload: Workload, layout: Layout) -> list[Moved]:
    """All that moves in a step, largest first."""
    return sorted(_Traffic(workload, layout).rows(), key=lambda row: -row.bytes)


class _Traffic:
    """One layout's quantities, each computed once."""

    def __init__(self, workload: Workload, layout: Layout) -> None:
        self.workload, self.layout, self.model = workload, layout, workload.model
        grid = Grid.of([layout])
        self.micro_batches = int(grid.micro_batches(workload.global_batch)[0])
        shares = share_parameters(self.model, grid)
        self.dense, self.experts = float(shares.rank[0]), float(shares.expert_rank[0])
        self.layers = -(-self.model.num_layers // layout.pp)
        self.expert_layers = round(self.layers * self.model.expert_layers / self.model.num_layers)
        tokens = (layout.micro_batch or 1) * workload.seq_len / layout.cp
        self.activation = tokens * self.model.hidden_size * WIRE_BYTES
        self.forwards = 2 if layout.recompute == "full" else 1
        self.strides = {
            "tp": 1,
            "cp": layout.tp,
            "dp_shard": layout.tp * layout.cp,
            "dp_replicate": layout.tp * layout.cp * layout.dp_shard,
            "pp": layout.tp * layout.cp * layout.data_degree,
        }

    def rows(self) -> list[Moved]:
        return [*self._tensor(), *self._context(), *self._expert(), *self._pipeline(), *self._data()]

    def _row(self, axis: str, op: str, ranks: int, calls: float, each: float, stride: int) -> Moved:
        tier = tier_of(self.workload.cluster, ranks, stride)
        return Moved(axis, op, "step", ranks, round(calls), round(calls * each), tier=tier)

    def _tensor(self) -> list[Moved]:
        """Behind attention and behind the feed-forward, in each direction."""
        layout = self.layout
        if layout.tp == 1:
            return []
        dense = 2 * self.layers - (0 if self.model.shared_experts else self.expert_layers)
        times = dense * self.micro_batches
        if not layout.sequence_parallel:
            calls = times * (self.forwards + 1)
            return [self._row("tp", "all_reduce", layout.tp, calls, self.activation, 1)]
        return [
            self._row("tp", "all_gather", layout.tp, times * (self.forwards + 2), self.activation, 1),
            self._row("tp", "reduce_scatter", layout.tp, times * (self.forwards + 1), self.activation, 1),
        ]

    def _context(self) -> list[Moved]:
        layout, model = self.layout, self.model
        if layout.cp == 1:
            return []
        tokens = (layout.micro_batch or 1) * self.workload.seq_len / layout.cp
        width = model.kv_size if model.attention == "heads" else model.query_size
        keys = tokens * 2 * max(width / layout.tp, model.head_size) * WIRE_BYTES
        times = self.layers * self.micro_batches
        if layout.context == "ring":
            calls = times * (layout.cp - 1) * (self.forwards + 2)
            return [self._row("cp", "send", layout.cp, calls, keys, layout.tp)]
        each = keys + tokens * 2 * model.query_size / layout.tp * WIRE_BYTES
        return [self._row("cp", "all_to_all", layout.cp, times * (self.forwards + 1), each, layout.tp)]

    def _expert(self) -> list[Moved]:
        """Dispatch and combine: local tokens x top_k x hidden x element size."""
        layout = self.layout
        if layout.ep == 1 or not self.expert_layers:
            return []
        each = self.activation / layout.tp * (self.model.experts_per_token or 1)
        calls = 2 * self.expert_layers * self.micro_batches * (self.forwards + 1)
        return [self._row("ep", "all_to_all", layout.ep, calls, each, layout.etp)]

    def _pipeline(self) -> list[Moved]:
        """A rank between two others sends forward and back."""
        layout = self.layout
        if layout.pp == 1:
            return []
        each = self.activation / (layout.tp if layout.sequence_parallel else 1)
        calls = 2 * self.micro_batches * layout.virtual_stages
        return [self._row("pp", "send", layout.pp, calls, each, self.strides["pp"])]

    def _data(self) -> list[Moved]:
        """Weights gathered and gradients reduced, experts over what ep leaves."""
        layout, rows = self.layout, []
        shard = layout.dp_shard * layout.cp
        axis = (
            "dp_shard+cp"
            if layout.cp > 1 and layout.dp_shard > 1
            else "dp_shard"
            if layout.dp_shard > 1
            else "cp"
        )
        stride = layout.tp
        count = self.dense + self.experts
        whole = shard if layout.zero else 1
        if layout.zero and shard > 1:
            gathers = self.micro_batches * 2 if layout.zero == 3 else 1
            often = layout.zero >= 2 and layout.accumulate == "sharded"
            reductions = self.micro_batches if often else 1
            blocks = self.layers if layout.zero == 3 else 1
            rows = [
                self._row(axis, "all_gather", shard, gathers * blocks, count * WIRE_BYTES / blocks, stride),
                self._row(
                    axis,
                    "reduce_scatter",
                    shard,
                    reductions * blocks,
                    count * GRADIENT_BYTES / blocks,
                    stride,
                ),
            ]
        elif layout.cp > 1:
            rows = [self._row("cp", "all_reduce", layout.cp, 1, count * GRADIENT_BYTES, stride)]
        if layout.dp_replicate > 1:
            each = count * GRADIENT_BYTES / whole
            stride = self.strides["dp_replicate"]
            rows.append(self._row("dp_replicate", "all_reduce", layout.dp_replicate, 1, each, stride))
        return rows


def bytes_by_axis(rows: list[Moved]) -> dict[tuple[str, str], int]:
    """Bytes of one rank and step, by axis and tier."""
    found: dict[tuple[str, str], int] = {}
    for row in rows:
        found[row.axis, row.tier] = found.get((row.axis, row.tier), 0) + row.bytes
    return found


def largest(values: dict[str, float]) -> str:
    """The name of the largest."""
    return max(values, key=lambda name: float(np.nan_to_num(values[name])))
