"""Time of collectives: the links that a group crosses, their bandwidth and latency."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.plan.estimate.grid import Floats, Grid, Ints
from meshwright.plan.estimate.sizes import expert_shards
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.time.rates import Rates
from meshwright.spec.cluster import Cluster

HOP_LATENCY_SHARE = 0.2
"""Latency that each further rank adds to a ring inside a node, relative to that of 2 ranks. From nccl-tests
on A100 with NVLink 3, all-reduce latency without bytes: 40 us on 2 ranks, 50 on 4, 87 on 8."""


@dataclass(frozen=True)
class Group:
    """One process group of every layout: its size, and the links of a ring over its ranks."""

    ranks: Floats
    bytes_per_s: Floats
    """Per rank, over the slowest link of the ring."""
    latency_s: Floats
    hops_s: Floats
    """Ring latency added by further ranks in a node."""
    inside: Floats
    """Ranks in one node."""
    link_bytes_per_s: float
    nic_bytes_per_s: Floats

    def all_reduce_s(self, moved: Floats) -> Floats:
        """All-reduce of a tensor of this many bytes."""
        return self._ring_s(2 * moved)

    def all_gather_s(self, whole: Floats) -> Floats:
        """All-gather to, or reduce-scatter from, a tensor of this many bytes."""
        return self._ring_s(whole)

    def all_to_all_s(self, moved: Floats, share: float, copies: int = 1) -> Floats:
        """All-to-all with equal splits; only the remote part crosses nodes.

        Args:
            moved: Bytes that a rank sends in total.
            share: Bandwidth relative to that of a ring.
            copies: Copies of each token in ``moved``; copies to the same node are sent once.
        """
        nodes = self.ranks / self.inside
        local = moved * (self.inside - 1) / self.ranks
        seen = 1 - (1 - 1 / nodes) ** copies
        """Probability that a token goes to a given node."""
        remote = moved * (nodes - 1) * seen / copies
        wire = np.maximum(local / self.link_bytes_per_s, remote / self.nic_bytes_per_s) / share
        return np.where(self.ranks > 1, wire + self.latency_s, 0.0)

    def send_s(self, moved: Floats) -> Floats:
        """One message to the next rank."""
        bandwidth = np.where(self.inside >= self.ranks, self.link_bytes_per_s, self.nic_bytes_per_s)
        return np.where(self.ranks > 1, moved / bandwidth + self.latency_s, 0.0)

    def sends_s(self, moved: Floats, calls: Floats) -> Floats:
        """``calls`` messages along a ring; ``moved`` bytes per hop."""
        wire = moved * (self.ranks - 1) / self.bytes_per_s
        return np.where(self.ranks > 1, wire + calls * self.latency_s, 0.0)

    def _ring_s(self, moved: Floats) -> Floats:
        wire = moved * (self.ranks - 1) / self.ranks / self.bytes_per_s
        # No bytes means no call: a model without experts has no expert collectives.
        return np.where((self.ranks > 1) & (moved > 0), wire + self.latency_s + self.hops_s, 0.0)


def build_group(cluster: Cluster, rates: Rates, ranks: Ints, stride: Ints) -> Group:
    """The group of ``ranks`` that are ``stride`` devices apart."""
    per_node = cluster.devices_per_node
    inside = np.clip(per_node // np.maximum(stride, 1), 1, ranks).astype(float)
    nodes = np.minimum(np.ceil(ranks * stride / per_node), cluster.nodes)  # CPU ranks may share cores
    crossing = nodes > 1
    link = cluster.link_bytes_per_s * rates.link
    nic = (cluster.nic_bytes_per_s or cluster.link_bytes_per_s) * rates.nic
    rack = cluster.nodes_per_rack or cluster.nodes
    between_racks = nodes > rack
    nic_each = np.where(between_racks, nic / cluster.spine_oversubscription, nic)
    bandwidth = np.where(crossing, np.minimum(link, nic_each * inside), link)
    near = cluster.link_latency_s * rates.link_latency
    far = (cluster.nic_latency_s or cluster.link_latency_s) * rates.nic_latency
    latency = np.where(crossing, near + far * np.log2(np.maximum(nodes, 2)), near)
    if cluster.spine_latency_s:
        latency = np.where(between_racks, latency + cluster.spine_latency_s, latency)
    members = np.where(crossing, inside, ranks)
    hops = HOP_LATENCY_SHARE * near * (members - 1)
    return Group(ranks.astype(float), bandwidth, latency, hops, members, link, nic_each)


@dataclass(frozen=True)
class Groups:
    """The process groups of a layout: tp innermost, then cp, dp_shard (with ep), dp_replicate, pp."""

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


def build_groups(workload: Workload, rates: Rates, grid: Grid) -> Groups:
    """Map the axes to the cluster; axes with most traffic get the fastest links."""

    def group(ranks: Ints, stride: Ints) -> Group:
        return build_group(workload.cluster, rates, ranks, stride)

    one = np.ones_like(grid.tp)
    shard = grid.dp_shard * grid.cp
    inner = grid.tp * shard
    return Groups(
        tp=group(grid.tp, one),
        cp=group(grid.cp, grid.tp),
        shard=group(shard, grid.tp),
        replicate=group(grid.dp_replicate, inner),
        pp=group(grid.pp, inner * grid.dp_replicate),
        ep=group(grid.ep, grid.etp),
        etp=group(grid.etp, one),
        expert_shard=group(expert_shards(grid), np.maximum(grid.ep * grid.etp, 1)),
    )
