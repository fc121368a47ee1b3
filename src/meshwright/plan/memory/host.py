"""CPU memory of a node: staging memory, snapshots, offloaded state, and the ranks if the device is the CPU.

Staging memory (asynchronous checkpoints) and in-memory snapshots are optional. Where snapshots do not fit
beside the rest they are off, and after a failure ranks go on from the newest checkpoint. Where staging memory
does not fit either, checkpoints are synchronous. The room per device is ``cluster.host_memory_bytes``; where
the device is the CPU and that is not given, ``cluster.memory_bytes``.
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
    staging_off = _describe_shortage(fullest, "copies of the state", 0, fullest.staging_bytes)
    staged = 0 if staging_off else fullest.staging_bytes
    snapshots_off = _describe_shortage(fullest, "those", staged, fullest.snapshot_bytes)
    return dataclasses.replace(fullest, snapshots_off=snapshots_off, staging_off=staging_off)


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
        staging_bytes=sum(rank.staging_bytes for rank in ranks),
    )


def _count_needed(memory: HostMemory) -> int:
    return memory.snapshot_bytes + memory.staging_bytes + memory.offloaded_bytes + memory.training_bytes


def _describe_shortage(memory: HostMemory, what: str, before: int, size: int) -> str:
    """Why something does not fit, as a sentence; empty if it does.

    Args:
        memory: Of the node.
        what: Names it in the sentence.
        before: Optional memory that comes first.
        size: Bytes that it needs.
    """
    needed = size + before + memory.offloaded_bytes + memory.training_bytes
    if not size or not memory.room_bytes or needed <= memory.room_bytes:
        return ""
    others = {
        "training": memory.training_bytes,
        "offloaded state": memory.offloaded_bytes,
        "the staging memory of checkpoints": before,
    }
    taken = "".join(f"; {name} takes {format_bytes(other)}" for name, other in others.items() if other)
    wanted = f"{what} of {format_plural(memory.ranks, 'rank')} need {format_bytes(size)}"
    return f"{wanted} of CPU memory per node, which has {format_bytes(memory.room_bytes)}{taken}"
