"""CPU memory of a node: in-memory snapshots, offloaded state, and the ranks where the device is the CPU.

Snapshots are optional. Where they do not fit beside the rest they are off, and after a failure ranks go on
from the newest checkpoint. The room per device is ``cluster.host_memory_bytes``; where the device is the CPU
and that is not given, ``cluster.memory_bytes``.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from meshwright.core.units import format_bytes, format_plural
from meshwright.plan.contract import HostMemory, RankPrediction
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job


def predict_host_memory(job: Job, ranks: Sequence[RankPrediction]) -> HostMemory:
    """The CPU memory of the node whose ranks need most of it."""
    by_node: dict[int, list[RankPrediction]] = defaultdict(list)
    for rank in ranks:
        by_node[_node_of(job.cluster, rank.rank)].append(rank)
    fullest = max((_add_up(job, found) for found in by_node.values()), key=_count_needed)
    return dataclasses.replace(fullest, snapshots_off=_describe_shortage(fullest))


def _node_of(cluster: Cluster, rank: int) -> int:
    """The node of a rank; ranks that share devices are on the last one."""
    return min(rank // cluster.devices_per_node, cluster.nodes - 1)


def _add_up(job: Job, ranks: Sequence[RankPrediction]) -> HostMemory:
    cluster, on_cpu = job.cluster, job.cluster.device == "cpu"
    room = cluster.host_memory_bytes or (cluster.memory_bytes if on_cpu else 0)
    return HostMemory(
        ranks=len(ranks),
        snapshot_bytes=sum(rank.snapshot_bytes for rank in ranks),
        rank_snapshot_bytes=max(rank.snapshot_bytes for rank in ranks),
        offloaded_bytes=sum(sum(rank.offloaded_bytes.values()) for rank in ranks),
        training_bytes=sum(rank.needed_bytes for rank in ranks) if on_cpu else 0,
        room_bytes=room * cluster.devices_per_node,
    )


def _count_needed(memory: HostMemory) -> int:
    return memory.snapshot_bytes + memory.offloaded_bytes + memory.training_bytes


def _describe_shortage(memory: HostMemory) -> str:
    if not memory.snapshot_bytes or not memory.room_bytes or _count_needed(memory) <= memory.room_bytes:
        return ""
    others = {"training": memory.training_bytes, "offloaded state": memory.offloaded_bytes}
    taken = "".join(f"; {name} takes {format_bytes(size)}" for name, size in others.items() if size)
    needed = f"those of {format_plural(memory.ranks, 'rank')} need {format_bytes(memory.snapshot_bytes)}"
    return f"{needed} of CPU memory per node, which has {format_bytes(memory.room_bytes)}{taken}"
