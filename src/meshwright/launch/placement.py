"""Which device of which node each rank uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.layout.placement import RankPlacement


class Device(NamedTuple):
    """A device of the run."""

    node: int
    number: int
    """On its node, from 0; the ``LOCAL_RANK`` of its rank."""

    def __str__(self) -> str:
        return f"device {self.number} of node {self.node}"


@dataclass(frozen=True)
class Placement:
    """The device of each rank, in the order of ranks."""

    devices: tuple[Device, ...]

    @classmethod
    def in_order(cls, world_size: int, ranks_per_node: int) -> Placement:
        """The first ranks on node 0, the next on node 1, and so on; the last node may have fewer."""
        return cls(tuple(Device(*divmod(rank, ranks_per_node)) for rank in range(world_size)))

    @classmethod
    def from_plan(cls, planned: RankPlacement) -> Placement:
        """The devices of the whole cluster, as a plan places ranks on them."""
        return cls(tuple(Device(*planned[rank]) for rank in range(len(planned.slots))))

    @classmethod
    def from_slots(cls, devices: Iterable[Device], slots: Sequence[int]) -> Placement:
        """Some devices, node by node, as slots: those that a plan for fewer devices has."""
        found = sorted(devices)
        return cls(tuple(found[slot] for slot in slots))

    @classmethod
    def on(cls, devices: Iterable[Device], world_size: int, block: int = 1) -> Placement:
        """Ranks on some of these devices, node by node.

        Args:
            devices: At least as many as ranks.
            world_size: Number of ranks.
            block: Consecutive ranks that should be on one node, if there are enough devices for it.
        """
        everything = tuple(sorted(devices))
        together = tuple(keep_blocks(everything, block))
        return cls((together if len(together) >= world_size else everything)[:world_size])

    @classmethod
    def from_pairs(cls, pairs: Sequence[Sequence[int]]) -> Placement:
        """From the numbers of nodes and devices, as JSON has them."""
        return cls(tuple(Device(int(node), int(number)) for node, number in pairs))

    @property
    def nodes(self) -> frozenset[int]:
        """Nodes with a rank."""
        return frozenset(device.node for device in self.devices)

    def ranks_on(self, node: int) -> list[int]:
        """The ranks of a node."""
        return [rank for rank, device in enumerate(self.devices) if device.node == node]


def keep_blocks(devices: Iterable[Device], block: int) -> list[Device]:
    """The devices without those that do not make a whole block on their node; all, if no node has one."""
    by_node: dict[int, list[Device]] = {}
    for device in sorted(devices):
        by_node.setdefault(device.node, []).append(device)
    kept = [d for found in by_node.values() for d in found[: len(found) // block * block]]
    return kept or [device for found in by_node.values() for device in found]
