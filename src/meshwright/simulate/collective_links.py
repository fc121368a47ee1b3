"""The links of a cluster, as a collective uses them: ports that messages share, latency and cost of a sum.

A message passes the ports on its path: out of its device and into the other inside a node; out of and into
the network interface (NIC) of a device between nodes; also the uplinks of both racks if they differ. A port
divides its bandwidth evenly among the messages that pass it at the same time; a message has the smallest of
its shares. Ports are full duplex: one each way.

The latencies of a cluster file are those of whole collectives. Here a collective costs ``launch_s`` once, and
each message ``alpha``: inside a node a tenth of ``cluster.link_latency_s`` (as in the time model, where each
further rank of a ring adds a fifth for its two steps), between nodes half of ``cluster.nic_latency_s``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.plan.time.network import HOP_LATENCY_SHARE
from meshwright.spec.cluster import Cluster

STEPS_PER_RANK = 2
"""Steps that a further rank adds to a ring all-reduce."""
ACCESSES_PER_SUM = 3
"""Memory accesses to add a received element: two reads and a write."""
Paths = dict[tuple[int, int], tuple[int, ...]]


@dataclass(frozen=True)
class Links:
    """Ports with their bandwidth, and the path of each pair of ranks."""

    ranks: int
    bytes_per_s: tuple[float, ...]
    """Bandwidth of each port."""
    names: tuple[str, ...]
    """Name of each port."""
    ports: Paths
    """The ports on the path of a source and a target."""
    alpha_s: dict[tuple[int, int], float]
    """Latency of a message on that path."""
    gamma_s_per_byte: float = 0.0
    """Time to add a received byte."""
    launch_s: float = 0.0
    """Time of a collective before its first message."""


def build_uniform_links(
    ranks: int,
    alpha_s: float,
    bytes_per_s: float,
    gamma_s_per_byte: float = 0.0,
    launch_s: float = 0.0,
) -> Links:
    """Every rank has one port each way to a switch that is never the bottleneck."""
    names = tuple(f"rank {rank} {way}" for rank in range(ranks) for way in ("out", "in"))
    pairs = [(s, t) for s in range(ranks) for t in range(ranks) if s != t]
    ports: Paths = {(s, t): (2 * s, 2 * t + 1) for s, t in pairs}
    latency = dict.fromkeys(pairs, alpha_s)
    return Links(ranks, (bytes_per_s,) * (2 * ranks), names, ports, latency, gamma_s_per_byte, launch_s)


def build_links(
    cluster: Cluster, ranks: int, devices: Sequence[int] | None = None, *, nic_per_node: bool = False
) -> Links:
    """The links of a cluster.

    Args:
        cluster: Nodes, links and tiers.
        ranks: Number of ranks.
        devices: The device of each rank, counted over all nodes; device r for rank r if left out.
        nic_per_node: Whether the devices of a node share one network interface, as wide as theirs together.
    """
    placed = list(range(ranks)) if devices is None else list(devices)
    nic = cluster.nic_bytes_per_s or cluster.link_bytes_per_s
    nodes = [device // cluster.devices_per_node for device in placed]
    per_rack = cluster.nodes_per_rack or max(cluster.nodes, max(nodes) + 1)
    racks = [node // per_rack for node in nodes]
    uplink = nic * per_rack * cluster.devices_per_node / cluster.spine_oversubscription
    names = [f"link of rank {rank} {way}" for rank in range(ranks) for way in ("out", "in")]
    widths = [cluster.link_bytes_per_s] * (2 * ranks)
    owners = nodes if nic_per_node else list(range(ranks))
    owner = "node" if nic_per_node else "rank"
    interfaces = max(owners) + 1
    names += [f"NIC of {owner} {index} {way}" for index in range(interfaces) for way in ("out", "in")]
    widths += [nic * (cluster.devices_per_node if nic_per_node else 1)] * (2 * interfaces)
    uplinks = len(widths)
    names += [f"uplink of rack {rack} {way}" for rack in range(max(racks) + 1) for way in ("out", "in")]
    widths += [uplink] * (2 * (max(racks) + 1))
    near = cluster.link_latency_s * HOP_LATENCY_SHARE / STEPS_PER_RANK
    far = (cluster.nic_latency_s or cluster.link_latency_s) / STEPS_PER_RANK
    spine = far + (cluster.spine_latency_s or 0.0) / STEPS_PER_RANK
    ports: Paths = {}
    alpha: dict[tuple[int, int], float] = {}
    for s in range(ranks):
        for t in range(ranks):
            if s == t:
                continue
            out, into = 2 * (ranks + owners[s]), 2 * (ranks + owners[t]) + 1
            if nodes[s] == nodes[t]:
                ports[s, t], alpha[s, t] = (2 * s, 2 * t + 1), near
            elif racks[s] == racks[t]:
                ports[s, t], alpha[s, t] = (out, into), far
            else:
                up, down = uplinks + 2 * racks[s], uplinks + 2 * racks[t] + 1
                ports[s, t], alpha[s, t] = (out, up, down, into), spine
    gamma = ACCESSES_PER_SUM / cluster.memory_bytes_per_s
    return Links(ranks, tuple(widths), tuple(names), ports, alpha, gamma, cluster.link_latency_s)
