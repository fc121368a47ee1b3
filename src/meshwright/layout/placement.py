"""Rank placement: which device slot of the cluster each rank has, and which network tier each axis crosses.

A slot is a device, counted over all nodes: slot s is device ``s % n`` of node ``s // n`` with n slots per
node. The plan has the slot of each rank (``PlanContract.placement``); without one, ranks have slots in rank
order. The planner searches it, agents start ranks by it, and the audit compares it with the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.layout.axes import INTER_NODE_AXIS, INTRA_NODE_AXIS, dense_reduce_axis, list_rank_groups
from meshwright.layout.stages import TIED_AXIS
from meshwright.layout.tensor_parallel import KV_REPLICA_AXIS
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.legality.placement import count_slots_per_node, find_slot_error

CONTAINING = {KV_REPLICA_AXIS: "tp", TIED_AXIS: "pp"}
"""Axes that are subsets of another axis."""
Slots = tuple[int, ...]
"""The slot of each rank."""
RANK_ORDER: Slots = ()
"""Rank r has slot r."""


class Slot(NamedTuple):
    """A device slot."""

    node: int
    device: int
    """On its node, from 0."""


@dataclass(frozen=True)
class RankPlacement:
    """The slot of each rank, by node and device."""

    slots: Slots
    per_node: int
    """Slots of each node."""

    @classmethod
    def of(cls, job: Job, slots: Sequence[int] = RANK_ORDER) -> RankPlacement:
        """The placement of a job's ranks; ``slots`` as in a plan."""
        found = tuple(slots) or tuple(range(job.layout.world_size))
        return cls(found, count_slots_per_node(job))

    def __getitem__(self, rank: int) -> Slot:
        return Slot(*divmod(self.slots[rank], self.per_node))

    def node_of(self, rank: int) -> int:
        """The node of a rank."""
        return self.slots[rank] // self.per_node

    def as_pairs(self) -> list[tuple[int, int]]:
        """Node and device of each rank."""
        return [(slot // self.per_node, slot % self.per_node) for slot in self.slots]

    def list_nodes(self) -> dict[int, list[int]]:
        """The ranks of each node that has some, in the order of its devices."""
        found: dict[int, list[int]] = {}
        for slot, rank in sorted((slot, rank) for rank, slot in enumerate(self.slots)):
            found.setdefault(slot // self.per_node, []).append(rank)
        return found


def given_slots(layout: Layout) -> Slots:
    """The slots that a layout names; empty for rank order, and if the planner searches them."""
    return RANK_ORDER if isinstance(layout.placement, str) else normalize_slots(layout.placement)


def normalize_slots(slots: Iterable[int]) -> Slots:
    """The slots as a plan has them: empty in rank order."""
    found = tuple(slots)
    return RANK_ORDER if found == tuple(range(len(found))) else found


def find_placement_error(job: Job, slots: Slots) -> str | None:
    """Why ranks cannot have the slots of a plan; None if they can."""
    if not slots:
        return None
    if len(slots) != job.layout.world_size:
        return f"has {len(slots)} slots; the layout has {job.layout.world_size} ranks"
    return find_slot_error(slots, job.cluster.nodes, count_slots_per_node(job))


def tier_of(job: Job, axis: str, slots: Slots = RANK_ORDER) -> str:
    """The slowest tier that a group of an axis crosses: ``node``, ``rack`` or ``spine``."""
    layout, cluster = job.layout, job.cluster
    if cluster.nodes == 1:
        return "node"
    if axis == INTRA_NODE_AXIS:
        return "node"
    if axis == INTER_NODE_AXIS:
        axis = dense_reduce_axis(layout).name
    placed, rack = RankPlacement.of(job, slots), cluster.nodes_per_rack or cluster.nodes
    groups = [list(range(layout.world_size))]
    if axis != "control":
        groups = list_rank_groups(layout, CONTAINING.get(axis, axis))
    nodes = [{placed.node_of(rank) for rank in group} for group in groups]
    if all(len(found) == 1 for found in nodes):
        return "node"
    return "rack" if all(len({node // rack for node in found}) == 1 for found in nodes) else "spine"
