"""A change of the layout during a run: its reason, its devices, and the state that it starts from.

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
from meshwright.elastic.policy import Failure
from meshwright.elastic.recovery import Recovery
from meshwright.launch.agent_pool import AgentPool
from meshwright.launch.placement import Device
from meshwright.launch.snapshot_slots import EMPTY

FindLayout = Callable[[frozenset[Device]], Any]
"""Finds the best layout for some devices; raises ``UserError`` if there is none."""


@dataclass(frozen=True)
class RetiredSteps:
    """The in-memory snapshots that a node has of an earlier layout."""

    retired_from: int
    """First generation of that layout."""
    steps: Mapping[int, list[int]]
    """By its ranks."""


Snapshots = Mapping[int, RetiredSteps]
"""By node."""


@dataclass(frozen=True)
class NextLayout:
    """The layout in which the run continues when all ranks have ended."""

    plan: Any
    """What the planner found."""
    devices: frozenset[Device]
    """The devices that it was chosen for."""
    reason: str


@dataclass
class LayoutChoice:
    """Chooses the next layout of a run whose layout may change."""

    devices: DevicePool
    find_layout: FindLayout
    current: Any
    """The plan that runs."""
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
        self.next, self.missing = None, ""
        try:
            self.next = NextLayout(self.find_layout(found), found, reason)
        except UserError as error:
            self.missing = str(error)
        return self.next is not None

    def grow(self, ready: Collection[int]) -> bool:
        """Choose a layout for more devices, if some came back and it is faster; returns whether it is."""
        now = time.monotonic()
        if self.next is not None or not self.devices.may_grow(ready, now):
            return False
        found = self.devices.available(ready, now)
        reason = f"{len(found)} devices are there, {len(self.devices.planned)} before"
        with contextlib.suppress(UserError):
            plan = self.find_layout(found)
            if found == self.devices.all or plan.step_s < self.current.step_s:
                self.next = NextLayout(plan, found, reason)
                return True
        self.devices.refuse(found)
        return False


@dataclass(frozen=True)
class StateSource:
    """Where the ranks of a new layout load their state from; without both fields the run starts again."""

    snapshot_step: int | None = None
    checkpoint: str | None = None
    reshard_from: str | None = None
    """The plan, in the run folder, of the layout whose snapshots have the step; None for this layout."""

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
    failures: tuple[Failure, ...]
    leaving: frozenset[int] = frozenset()
    """Nodes that are about to be taken away, and were not waited for."""
    plan_files: tuple[str, ...] = ()
    """Plans of earlier layouts whose snapshots may still be needed: no rank of a later one was ready."""


@dataclass(frozen=True)
class EarlierLayout:
    """The state that a supervisor takes over from the supervisor of the previous layout."""

    change: LayoutChange
    plan_files: tuple[str, ...]
    """Plans of layouts before, in the run folder, whose snapshots may be loaded."""
    files: Mapping[str, str]
    """Plan and assignment for the run folders of other nodes."""
    choose_state: Callable[[Snapshots], StateSource]


def newest_covering_step(
    kept_by_node: Collection[Mapping[int, list[int]]], covers: Callable[[frozenset[int]], bool]
) -> int | None:
    """The newest step at which each node has snapshots of the whole state; None if there is none.

    Args:
        kept_by_node: The steps that each node of the new layout has, by ranks of the previous layout. A rank
            reads only from its own node.
        covers: Whether some ranks of the previous layout have the whole state together.
    """
    steps = {step for ranks in kept_by_node for kept in ranks.values() for step in kept} - {EMPTY}
    for step in sorted(steps, reverse=True):
        holders = [frozenset(rank for rank, kept in ranks.items() if step in kept) for ranks in kept_by_node]
        if all(ranks and covers(ranks) for ranks in set(holders)):
            return step
    return None
