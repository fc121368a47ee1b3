"""Going on in another layout: why, on which devices, and from which state.

The supervisor ends all ranks of a layout (``LayoutChange``). Its caller writes the new plan, and a new
supervisor starts the ranks of the next layout with the same agents (``EarlierLayout``). The planner is passed
in as a function.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.core.errors import UserError
from meshwright.elastic.devices import DevicePool
from meshwright.elastic.recovery import Recovery
from meshwright.launch.agent_pool import AgentPool
from meshwright.launch.placement import Device
from meshwright.launch.snapshot_slots import EMPTY

FindLayout = Callable[[frozenset[Device]], Any]
"""Finds the best layout for some devices; raises ``UserError`` if there is none."""
Snapshots = Mapping[int, Mapping[int, list[int]]]
"""The steps of the snapshots of each rank of a layout, by the node that has them."""


@dataclass(frozen=True)
class NextLayout:
    """A layout that the run goes on in when its ranks have ended."""

    plan: Any
    """What the planner found."""
    devices: frozenset[Device]
    """That it was chosen for."""
    reason: str


@dataclass
class LayoutChoice:
    """Chooses the next layout of a run whose layout may change."""

    devices: DevicePool
    find_layout: FindLayout
    next: NextLayout | None = None
    missing: str = ""
    """Why no layout fits the devices that are left; empty if one does."""

    def shrink(self, ready: Collection[int], reason: str) -> bool:
        """Choose a layout for the devices that are left; returns whether there is one.

        Args:
            ready: Nodes whose agent can start ranks.
            reason: Why the layout changes.
        """
        found = self.devices.available(ready, time.monotonic())
        try:
            self.next, self.missing = NextLayout(self.find_layout(found), found, reason), ""
        except UserError as error:
            self.missing = str(error)
        return self.next is not None

    def grow(self, ready: Collection[int]) -> bool:
        """Choose a layout for more devices, if some came back and it is better; returns whether it is."""
        now = time.monotonic()
        if self.next is not None or not self.devices.may_grow(ready, now):
            return False
        found = self.devices.available(ready, now)
        reason = f"{len(found)} devices are there, {len(self.devices.planned)} before"
        with contextlib.suppress(UserError):
            self.next = NextLayout(self.find_layout(found), found, reason)
            return True
        self.devices.refuse(found)
        return False


@dataclass(frozen=True)
class StateSource:
    """Where the ranks of a new layout load their state from; neither: the run starts again."""

    snapshot_step: int | None = None
    checkpoint: str | None = None

    @property
    def name(self) -> str:
        """``snapshot``, ``checkpoint`` or ``start``."""
        if self.snapshot_step is not None:
            return "snapshot"
        return "start" if self.checkpoint is None else "checkpoint"


@dataclass(frozen=True)
class LayoutChange:
    """All ranks have ended: the run goes on in another layout."""

    next: NextLayout
    generation: int
    """The last one of the layout that ended."""
    furthest_step: int
    min_position: int
    """Samples that a rollback skipped."""
    recovery: Recovery
    agents: AgentPool
    ready: frozenset[int]
    """Nodes whose agent can start ranks."""
    store_dir: str
    members: frozenset[int]
    """Nodes of the last generation whose ranks were all ready."""


@dataclass(frozen=True)
class EarlierLayout:
    """What a supervisor takes over from the one of the layout before."""

    change: LayoutChange
    generation: int
    """The first one of the next layout."""
    plan_file: str
    """Plan of the layout before, in the run folder."""
    files: Mapping[str, str]
    """Plan and assignment for the run folders of other nodes."""
    choose_state: Callable[[Snapshots], StateSource]


def newest_covering_step(
    snapshots: Snapshots, nodes: frozenset[int], covers: Callable[[frozenset[int]], bool]
) -> int | None:
    """The newest step at which each node has snapshots of the whole state; None if there is none.

    Args:
        snapshots: Of the layout before.
        nodes: That have a rank in the new layout: a rank reads only from its own node.
        covers: Whether some ranks of the layout before have the whole state together.
    """
    steps = {step for ranks in snapshots.values() for kept in ranks.values() for step in kept} - {EMPTY}
    for step in sorted(steps, reverse=True):
        holders = [
            frozenset(rank for rank, kept in snapshots.get(node, {}).items() if step in kept)
            for node in nodes
        ]
        if all(ranks and covers(ranks) for ranks in set(holders)):
            return step
    return None
