"""Which devices a run has, and when it may change its layout to use more of them.

Times are those of the supervisor's monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from meshwright.launch.placement import Device


@dataclass
class DevicePool:
    """The devices of a run over all its layouts."""

    all: frozenset[Device]
    """The devices of the first layout: the run never uses others."""
    grow_after_s: float
    """How long a device that came back must stay before it is used."""
    retry_s: float
    """How long a device that was left out is not used; 0: for the rest of the run."""
    planned: frozenset[Device] = frozenset()
    """The devices for which the current layout was chosen; it may use fewer."""
    _excluded: dict[Device, float] = field(default_factory=dict)
    """When each device may be used again."""
    _back_since: float = math.inf
    """Since when there are more devices than planned."""
    _refused: frozenset[Device] = frozenset()
    """Devices for which the planner found no better layout."""

    def __post_init__(self) -> None:
        self.planned = self.planned or self.all

    def exclude(self, device: Device, now: float) -> None:
        """Leave a device out."""
        self._excluded[device] = now + self.retry_s if self.retry_s else math.inf

    def available(self, nodes: Collection[int], now: float) -> frozenset[Device]:
        """The devices that can be used now.

        Args:
            nodes: Those with an agent that can start ranks.
            now: The time.
        """
        return frozenset(d for d in self.all if d.node in nodes and self._excluded.get(d, 0.0) <= now)

    def may_return(self, nodes: Collection[int], now: float) -> bool:
        """Whether a device that is missing can come back."""
        missing = self.all - self.available(nodes, now)
        return any(device.node not in nodes or self._excluded[device] < math.inf for device in missing)

    def include(self, device: Device) -> None:
        """Use a device after all."""
        self._excluded.pop(device, None)

    def may_grow(self, nodes: Collection[int], now: float) -> bool:
        """Whether devices came back and have stayed for ``grow_after_s``; called repeatedly."""
        found = self.available(nodes, now)
        if not found - self.planned or found == self._refused:
            self._back_since = math.inf
            return False
        self._back_since = min(self._back_since, now)
        return now - self._back_since >= self.grow_after_s

    def refuse(self, devices: frozenset[Device]) -> None:
        """Do not plan for these devices again: the planner found no better layout."""
        self._refused = devices

    def plan(self, devices: frozenset[Device]) -> None:
        """The run goes on with a layout that was chosen for these devices."""
        self.planned, self._back_since, self._refused = devices, math.inf, frozenset()
