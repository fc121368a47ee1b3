"""Who may go on when the network is partitioned: a pure function of the nodes on one side.

A run has one supervisor, on node 0. It goes on only if more than half of the nodes of the last committed
generation have an agent that is connected to it; the agent of a node may be a new one. On a tie neither side
goes on. Nodes on the other side never go on: they have no supervisor, and no step ends without all ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from meshwright.core.units import format_plural


@dataclass(frozen=True)
class Quorum:
    """The nodes of the last committed generation, and those of them on the side of the supervisor."""

    members: frozenset[int]
    present: frozenset[int]

    @classmethod
    def count(cls, members: Collection[int], connected: Collection[int]) -> Quorum:
        """Count the nodes of one side.

        Args:
            members: Nodes of the last committed generation; empty before the first one.
            connected: Nodes whose agent is connected to the supervisor.
        """
        return cls(frozenset(members), frozenset(members) & frozenset(connected))

    @property
    def holds(self) -> bool:
        """Whether this side may go on: more than half of the nodes; half is not enough."""
        return not self.members or 2 * len(self.present) > len(self.members)

    def explain(self) -> str:
        """Why this side may not go on."""
        of = format_plural(len(self.members), "node")
        return (
            f"{len(self.present)} of {of} of the last generation left: no majority, so nothing is committed"
        )
