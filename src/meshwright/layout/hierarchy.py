"""The hierarchical all-reduce of gradients (``train.all_reduce``): its process groups and its buffers.

DDP all-reduces each bucket in three phases (``schedule.collective.phases``): reduce-scatter inside each node,
all-reduce of each shard between the nodes, all-gather inside each node. Chunks of the bucket are pipelined
through the phases. With K nodes, each node sends 2 (K - 1) / K of a bucket; a ring over R ranks sends
2 (R - 1) / R: 1.5 times as much for two nodes of two ranks. Ranks are placed in rank order or as the job
says: the planner does not search a placement for a hierarchical all-reduce.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.layout.axes import dense_reduce_axis, list_rank_groups, uses_ddp
from meshwright.layout.ddp_buckets import bucket_stage
from meshwright.layout.placement import RankPlacement, given_slots
from meshwright.layout.stages import local_stages
from meshwright.spec.job import Job

if TYPE_CHECKING:  # imported late: few jobs need schedules, and every rank imports this module
    from meshwright.schedule.collective.phases import Groups
    from meshwright.schedule.collective.steps import CollectiveSchedule

MOST_CHUNKS = 4
"""Chunks of a bucket: one is exchanged between the nodes while another one is exchanged inside them."""
LEAST_CHUNK_ELEMENTS = 1 << 16
"""Smaller chunks cost more latency than they hide."""


@dataclass(frozen=True)
class Hierarchy:
    """How the gradients of a job are all-reduced in phases."""

    schedule: CollectiveSchedule
    """Over the ranks of one group of the reduction."""
    intra_node: tuple[tuple[int, ...], ...]
    """Global ranks of every group inside a node."""
    inter_node: tuple[tuple[int, ...], ...]
    """Global ranks of every group between nodes."""

    @property
    def ranks_per_node(self) -> int:
        """Shards of a bucket."""
        return len(self.intra_node[0])

    @property
    def nodes(self) -> int:
        """Ranks with the same shard."""
        return len(self.inter_node[0])

    def padded(self, count: int) -> int:
        """Elements of a bucket that can be split into equal shards."""
        return -(-count // self.ranks_per_node) * self.ranks_per_node

    def chunks(self, count: int) -> list[tuple[int, int]]:
        """The chunks of a bucket that are pipelined: the parts of a shard, from and to which element."""
        from meshwright.schedule.collective.steps import split_evenly  # noqa: PLC0415

        shard = self.padded(count) // self.ranks_per_node
        chunks = min(MOST_CHUNKS, max(1, count // LEAST_CHUNK_ELEMENTS))
        return list(split_evenly(0, shard, chunks))

    def buffer_sizes(self, buckets: Sequence[int]) -> tuple[int, int]:
        """Elements of the buffer for a bucket that does not split evenly, and of the buffer for a shard.

        Args:
            buckets: Elements of each bucket.
        """
        padded = max((self.padded(count) for count in buckets if count % self.ranks_per_node), default=0)
        return padded, max(map(self.padded, buckets)) // self.ranks_per_node


def find_hierarchy(job: Job) -> Hierarchy | None:
    """The phases of the gradient all-reduce; None if the backend runs it as one collective.

    Args:
        job: With its layout settled.
    """
    if job.train.all_reduce != "hierarchical" or explain_flat(job) is not None:
        return None
    return _build_hierarchy(_list_nodes(job), tuple(map(tuple, _list_reduce_groups(job))))


def explain_flat(job: Job) -> str | None:
    """Why a hierarchical all-reduce would have no effect; None if it has one."""
    if not uses_ddp(job):
        return f"DDP all-reduces no gradients with {job.layout.named_degrees()}"
    if job.cluster.device == "cuda":
        return "NCCL runs the all-reduce, and chooses its algorithm by itself"
    sizes = {len(node) for nodes in _list_nodes_of_groups(job) for node in nodes}
    if any(len(nodes) == 1 for nodes in _list_nodes_of_groups(job)):
        return "the ranks that reduce a gradient are on one node"
    if sizes == {1}:
        return "every node has one of the ranks that reduce a gradient"
    if len(sizes) > 1:
        return "the nodes have different numbers of the ranks that reduce a gradient"
    if len({_places(nodes) for nodes in _list_nodes_of_groups(job)}) > 1:
        return "layout.placement spreads the groups that reduce gradients differently over the nodes"
    return None


def bucket_sizes(job: Job) -> list[int]:
    """Elements of each gradient bucket."""
    (stage,) = local_stages(job, 0)
    return [sum(p.count for p in bucket) for bucket in bucket_stage(stage, False, job.layout.bucket_mb)]


def _list_reduce_groups(job: Job) -> list[list[int]]:
    return list_rank_groups(job.layout, dense_reduce_axis(job.layout).name)


def _list_nodes_of_groups(job: Job) -> list[tuple[tuple[int, ...], ...]]:
    """The global ranks of each group of the reduction, by node."""
    found, placed = [], RankPlacement.of(job, given_slots(job.layout))
    for group in _list_reduce_groups(job):
        nodes: dict[int, list[int]] = {}
        for rank in group:
            nodes.setdefault(placed.node_of(rank), []).append(rank)
        found.append(tuple(map(tuple, nodes.values())))
    return found


def _places(nodes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Positions in the group instead of ranks."""
    at = {rank: i for i, rank in enumerate(sorted(rank for node in nodes for rank in node))}
    return tuple(tuple(at[rank] for rank in node) for node in nodes)


def _list_nodes(job: Job) -> Groups:
    return _places(_list_nodes_of_groups(job)[0])


@functools.lru_cache(maxsize=64)
def _build_hierarchy(nodes: Groups, groups: Groups) -> Hierarchy:
    """The phases of a schedule, with the ranks of each group of the reduction in place of its ranks."""
    from meshwright.schedule.collective.build import build_collective  # noqa: PLC0415
    from meshwright.schedule.collective.phases import find_phases  # noqa: PLC0415

    schedule = build_collective("all_reduce", "hierarchical", len(groups[0]), groups=nodes)
    phases = find_phases(schedule)
    return Hierarchy(
        schedule,
        tuple(tuple(group[i] for i in members) for group in groups for members in phases.inside),
        tuple(tuple(group[i] for i in members) for group in groups for members in phases.between),
    )
