"""Which device of which node each rank uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


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
    def on(cls, devices: Iterable[Device], world_size: int) -> Placement:
        """Ranks on some of these devices, node by node.

        Args:
            devices: At least as many as ranks.
            world_size: Number of ranks.
        """
        return cls(tuple(sorted(devices)[:world_size]))

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
