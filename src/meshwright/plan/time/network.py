"""Time of collectives: the links that a group crosses, their bandwidth and latency."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from meshwright.plan.estimate.grid import Flags, Floats, Grid, Ints
from meshwright.plan.estimate.sizes import expert_shards
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.time.rates import Rates
from meshwright.spec.cluster import Cluster
from meshwright.spec.probed import CollectiveTime

HOP_LATENCY_SHARE = 0.2
"""Latency that each further rank adds to a ring inside a node, relative to that of 2 ranks. From nccl-tests
on A100 with NVLink 3, all-reduce latency without bytes: 40 us on 2 ranks, 50 on 4, 87 on 8."""


Collectives = Mapping[str, CollectiveTime]
"""Measured collectives of a transport, by operation."""


def find_collectives(workload: Workload) -> Collectives:
    """The probed collectives of the transport that runs them inside a node; empty if they were not probed."""
    probed = workload.cluster.probed
    found = () if probed is None or probed.device != workload.cluster.device else probed.collectives
    return {one.op: one for one in found if one.transport == workload.transport}


@dataclass(frozen=True)
class Group:
    """One process group of every layout: its size, and the links of a ring over its ranks."""

    ranks: Floats
    bytes_per_s: Floats
    """Per rank, over the slowest link of the ring."""
    latency_s: Floats
    hops_s: Floats
    """Ring latency added by further ranks in a node."""
    ring_latency_s: Floats
    """Latency of one all-gather or reduce-scatter beyond ``latency_s``: a ring has as many steps as ranks."""
    ranks_per_node: Floats
    """Ranks in one node."""
    link_bytes_per_s: float
    nic_bytes_per_s: Floats
    probed: Collectives = field(default_factory=dict)
    """Measured collectives, for groups inside a node."""

    def all_reduce_s(self, moved: Floats, calls: Floats | float = 1.0) -> Floats:
        """All-reduce of a tensor of this many bytes; in several calls, if the collective was probed."""
        return self._probed_s("all_reduce", moved, self._ring_s(2 * moved), calls)

    def hierarchical_all_reduce_s(self, moved: Floats, calls: Floats | float) -> Floats:
        """All-reduce in phases: inside the nodes whole tensors, between them the shard of each rank."""
        nodes = self.ranks / self.ranks_per_node
        inside = 2 * moved * (self.ranks_per_node - 1) / self.ranks_per_node / self.link_bytes_per_s
        between = 2 * moved / self.ranks_per_node * (nodes - 1) / nodes / self.nic_bytes_per_s
        phased = inside + between + self.latency_s + self.hops_s
        return np.where((self.ranks_per_node > 1) & (nodes > 1), phased, self.all_reduce_s(moved, calls))

    def all_gather_s(self, whole: Floats, calls: Floats | float = 1.0) -> Floats:
        """All-gather to a tensor of this many bytes, in ``calls`` calls."""
        return self._probed_s("all_gather", whole, self._shards_s(whole, calls), calls)

    def reduce_scatter_s(self, whole: Floats, calls: Floats | float = 1.0) -> Floats:
        """Reduce-scatter from a tensor of this many bytes, in ``calls`` calls."""
        return self._probed_s("reduce_scatter", whole, self._shards_s(whole, calls), calls)

    def all_to_all_s(
        self, moved: Floats, share: float, copies: int = 1, max_nodes: float = float("inf")
    ) -> Floats:
        """All-to-all with equal splits; only the remote part crosses nodes.

        Args:
            moved: Bytes that a rank sends in total.
            share: Bandwidth relative to that of a ring.
            copies: Copies of each token in ``moved``; copies to the same node are sent once.
            max_nodes: Nodes that the copies of one token go to, at most.
        """
        nodes = self.ranks / self.ranks_per_node
        local = moved * (self.ranks_per_node - 1) / self.ranks
        node_probability = np.minimum(1 - (1 - 1 / nodes) ** copies, max_nodes / nodes)
        remote = moved * (nodes - 1) * node_probability / copies
        wire = np.maximum(local / self.link_bytes_per_s, remote / self.nic_bytes_per_s) / share
        return self._probed_s("all_to_all", moved, np.where(self.ranks > 1, wire + self.latency_s, 0.0))

    def send_s(self, moved: Floats) -> Floats:
        """One message to the next rank."""
        bandwidth = np.where(self.ranks_per_node >= self.ranks, self.link_bytes_per_s, self.nic_bytes_per_s)
        return np.where(self.ranks > 1, moved / bandwidth + self.latency_s, 0.0)

    def sends_s(self, moved: Floats, calls: Floats) -> Floats:
        """``calls`` messages along a ring; ``moved`` bytes per hop."""
        wire = moved * (self.ranks - 1) / self.bytes_per_s
        return np.where(self.ranks > 1, wire + calls * self.latency_s, 0.0)

    def control_s(self) -> Floats:
        """All-reduce of a few control values."""
        return self._probed_s("all_reduce", np.ones_like(self.ranks), self.latency_s)

    def _shards_s(self, whole: Floats, calls: Floats | float) -> Floats:
        """A ring over all ranks, in each call."""
        wire = whole * (self.ranks - 1) / self.ranks / self.bytes_per_s
        latency = (self.latency_s + self.ring_latency_s) * calls
        return np.where((self.ranks > 1) & (whole > 0), wire + latency, 0.0)

    def _probed_s(self, op: str, moved: Floats, otherwise: Floats, calls: Floats | float = 1.0) -> Floats:
        """A probed collective, if the group is inside a node; scaled to its ranks as a ring.

        A call through shared memory takes as long on more ranks, if each has a core; gloo sends around the
        ring.
        """
        one = self.probed.get(op)
        if one is None:
            return otherwise
        others = self.ranks - 1
        wire = moved / one.bytes_per_s * (others / self.ranks) / ((one.ranks - 1) / one.ranks)
        steps = others / (one.ranks - 1) if one.transport == "gloo" else 1.0
        here = (self.ranks > 1) & (self.ranks_per_node >= self.ranks)
        return np.where(here & (moved > 0), wire + calls * steps * one.alpha_s, otherwise)

    def _ring_s(self, moved: Floats) -> Floats:
        wire = moved * (self.ranks - 1) / self.ranks / self.bytes_per_s
        # No bytes means no call: a model without experts has no expert collectives.
        return np.where((self.ranks > 1) & (moved > 0), wire + self.latency_s + self.hops_s, 0.0)


@dataclass(frozen=True)
class Span:
    """The nodes that a process group of every layout covers, and the network interfaces of its ring."""

    nodes: Floats
    """From the first node to the last one, with those between that have no rank of the group."""
    ranks_per_node: Floats
    """Ranks in the node with most of them."""
    nics: Floats
    """Bandwidth between nodes that a ring has, relative to the network interface of one device."""
    between_racks: Flags


def span_of_stride(cluster: Cluster, ranks: Ints, stride: Ints, world_size: Ints) -> Span:
    """The span of ``ranks`` whose slots are ``stride`` apart, where nodes divide groups evenly.

    Other placements are in ``plan.time.spans``.
    """
    per_node = np.maximum(cluster.devices_per_node, -(-world_size // cluster.nodes))  # ranks may share cores
    inside = np.clip(per_node // np.maximum(stride, 1), 1, ranks).astype(float)
    nodes = np.minimum(np.ceil(ranks * stride / per_node), cluster.nodes)
    rack = cluster.nodes_per_rack or cluster.nodes
    return Span(nodes, inside, inside * cluster.devices_per_node / per_node, nodes > rack)


def build_group(
    cluster: Cluster, rates: Rates, ranks: Ints, span: Span, probed: Collectives | None = None
) -> Group:
    """The group of ``ranks`` that cover these nodes, with probed collectives."""
    crossing = span.nodes > 1
    link = cluster.link_bytes_per_s * rates.link
    nic = (cluster.nic_bytes_per_s or cluster.link_bytes_per_s) * rates.nic
    nic_each = np.where(span.between_racks, nic / cluster.spine_oversubscription, nic)
    bandwidth = np.where(crossing, np.minimum(link, nic_each * span.nics), link)
    node_latency = cluster.link_latency_s * rates.link_latency
    network_latency = (cluster.nic_latency_s or cluster.link_latency_s) * rates.nic_latency
    latency = np.where(
        crossing, node_latency + network_latency * np.log2(np.maximum(span.nodes, 2)), node_latency
    )
    if cluster.spine_latency_s:
        latency = np.where(span.between_racks, latency + cluster.spine_latency_s, latency)
    members = np.where(crossing, span.ranks_per_node, ranks)
    hops = HOP_LATENCY_SHARE * node_latency * (members - 1)
    # All-reduces of many nodes use a tree; all-gathers and reduce-scatters a ring over all of them.
    nodes = span.nodes
    steps = HOP_LATENCY_SHARE * node_latency / 2 * (ranks - nodes)
    steps = steps + network_latency * (nodes - np.log2(np.maximum(nodes, 2)))
    gather = np.where(crossing, np.maximum(steps, hops), hops)
    counts = ranks.astype(float)
    return Group(counts, bandwidth, latency, hops, gather, members, link, nic_each, probed or {})


def find_overlap(workload: Workload, rates: Rates, grid: Grid) -> Floats:
    """Share of communication that compute can hide.

    Collectives of CPU ranks are work of the CPU: copies and sums. If they were probed, and every core has a
    rank, nothing is hidden.
    """
    busy = (grid.world_size >= workload.cluster.world_size) & bool(find_collectives(workload))
    return np.where(busy & (workload.cluster.device == "cpu"), 0.0, rates.overlap)


@dataclass(frozen=True)
class Groups:
    """The process groups of a layout."""

    tp: Group
    cp: Group
    shard: Group
    """dp_shard x cp: the group that ZeRO shards over."""
    replicate: Group
    pp: Group
    ep: Group
    etp: Group
    """Ranks that share an expert's matrices."""
    expert_shard: Group
    """The part of the shard group outside ep: the group that experts are sharded over."""
    world: Group
    """All ranks."""


def build_groups(
    workload: Workload, rates: Rates, grid: Grid, spans: Mapping[str, Span] | None = None
) -> Groups:
    """Map the axes to the cluster.

    Args:
        workload: For its cluster.
        rates: Calibrated shares of its bandwidths and latencies.
        grid: The layouts.
        spans: The span of each group, for ranks that are placed (``plan.time.spans``). By default ranks are
            placed in rank order: tp innermost, then cp, dp_shard (with ep), dp_replicate, pp.
    """
    degrees, probed = list_degrees(grid), find_collectives(workload)
    if spans is None:
        spans = {
            name: span_of_stride(workload.cluster, ranks, stride, grid.world_size)
            for name, (ranks, stride) in degrees.items()
        }
    return Groups(
        **{
            name: build_group(workload.cluster, rates, ranks, spans[name], probed)
            for name, (ranks, _) in degrees.items()
        }
    )


def list_degrees(grid: Grid) -> dict[str, tuple[Ints, Ints]]:
    """Size of each group of :class:`Groups`, and how many slots apart its ranks are in rank order."""
    one = np.ones_like(grid.tp)
    shard = grid.dp_shard * grid.cp
    inner = grid.tp * shard
    return {
        "tp": (grid.tp, one),
        "cp": (grid.cp, grid.tp),
        "shard": (shard, grid.tp),
        "replicate": (grid.dp_replicate, inner),
        "pp": (grid.pp, inner * grid.dp_replicate),
        "ep": (grid.ep, grid.etp),
        "etp": (grid.etp, one),
        "expert_shard": (expert_shards(grid), np.maximum(grid.ep * grid.etp, 1)),
        "world": (grid.world_size, one),
    }
