"""CPU memory of a node: staging memory, snapshots, offloaded state, shared memory, and the ranks on CPUs.

Staging memory (asynchronous checkpoints) and in-memory snapshots are optional. Where snapshots do not fit
beside the rest they are off, and after a failure ranks go on from the newest checkpoint. Where staging memory
does not fit either, checkpoints are synchronous. While the layout of a run changes, the snapshots of both
layouts are in memory; this turns nothing off in advance, because it lasts only until the ranks have loaded
their state: ranks that then find too little memory have no snapshots. The room per device is
``cluster.host_memory_bytes``; where the device is the CPU and that is not given, ``cluster.memory_bytes``.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from meshwright.core.units import format_bytes, format_plural
from meshwright.layout.placement import RANK_ORDER, RankPlacement, Slots
from meshwright.layout.shared_memory import collective_bytes
from meshwright.plan.contract import CpuMemory, RankPrediction
from meshwright.spec.execution import resolve_transport
from meshwright.spec.job import Job


def predict_cpu_memory(job: Job, ranks: Sequence[RankPrediction], slots: Slots = RANK_ORDER) -> CpuMemory:
    """The CPU memory of the node whose ranks need most of it.

    Args:
        job: With a complete layout.
        ranks: Memory of each rank.
        slots: The slot of each rank.
    """
    placed = RankPlacement.of(job, slots)
    by_node: dict[int, list[RankPrediction]] = defaultdict(list)
    for rank in ranks:
        by_node[placed.node_of(rank.rank)].append(rank)
    fullest = max((_add_up(job, found) for found in by_node.values()), key=_count_needed)
    staging_off = _describe_shortage(fullest, "copies of the state", 0, fullest.staging_bytes)
    staged = 0 if staging_off else fullest.staging_bytes
    snapshots_off = _describe_shortage(fullest, "those", staged, fullest.snapshot_bytes)
    may_change = job.elastic.may_change != "nothing" and not snapshots_off
    changing = fullest.snapshot_bytes if may_change else 0
    return dataclasses.replace(
        fullest, snapshots_off=snapshots_off, staging_off=staging_off, changing_bytes=changing
    )


def follow_layout(memory: CpuMemory, before: CpuMemory | None) -> CpuMemory:
    """The CPU memory of a layout that follows another one: its ranks load the snapshots of the one before.

    Args:
        memory: Memory of a node in the next layout.
        before: In the previous layout; None if it is not known.
    """
    if before is None:
        return memory
    retired = 0 if before.snapshots_off else before.snapshot_bytes
    return dataclasses.replace(memory, changing_bytes=retired)


def _add_up(job: Job, ranks: Sequence[RankPrediction]) -> CpuMemory:
    cluster, on_cpu = job.cluster, job.cluster.device == "cpu"
    shares_memory = resolve_transport(job) == "shared_memory"
    room = cluster.host_memory_bytes or (cluster.memory_bytes if on_cpu else 0)
    return CpuMemory(
        ranks=len(ranks),
        snapshot_bytes=sum(rank.snapshot_bytes for rank in ranks),
        rank_snapshot_bytes=max(rank.snapshot_bytes for rank in ranks),
        offloaded_bytes=sum(sum(rank.offloaded_bytes.values()) for rank in ranks),
        training_bytes=sum(rank.needed_bytes for rank in ranks) if on_cpu else 0,
        room_bytes=room * cluster.devices_per_node,
        staging_bytes=sum(rank.staging_bytes for rank in ranks),
        collective_bytes=collective_bytes(job, [r.rank for r in ranks]) if shares_memory else 0,
    )


def _count_needed(memory: CpuMemory) -> int:
    optional = memory.snapshot_bytes + memory.staging_bytes
    return optional + memory.offloaded_bytes + memory.training_bytes + memory.collective_bytes


def _describe_shortage(memory: CpuMemory, what: str, before: int, size: int) -> str:
    """Why something does not fit, as a sentence; empty if it does.

    Args:
        memory: Memory of the node.
        what: Names it in the sentence.
        before: Optional memory that comes first.
        size: Bytes that it needs.
    """
    needed = size + before + memory.offloaded_bytes + memory.training_bytes + memory.collective_bytes
    if not size or not memory.room_bytes or needed <= memory.room_bytes:
        return ""
    others = {
        "training": memory.training_bytes,
        "offloaded state": memory.offloaded_bytes,
        "the shared memory of collectives": memory.collective_bytes,
        "the staging memory of checkpoints": before,
    }
    taken = "".join(f"; {name} takes {format_bytes(other)}" for name, other in others.items() if other)
    need = f"{what} of {format_plural(memory.ranks, 'rank')} need {format_bytes(size)}"
    return f"{need} of CPU memory per node, which has {format_bytes(memory.room_bytes)}{taken}"
