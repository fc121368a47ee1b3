"""Finds agents that have sent nothing for a while: their machine is cut off, stopped or gone.

Agents send something every half second, also while they wait as spares or prepare to become a node. Ages are
measured here, on a monotonic clock. If this process itself was paused, the pause counts as one short
interval, so that no agent is lost by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SILENT_S = 6.0
"""An agent that sends nothing for this long is lost."""
LONGEST_POLL_S = 2.0
"""A longer interval between two polls means that this process was paused."""


class SilenceWatch:
    """The time since the last message of each agent, by a number that names it."""

    def __init__(self, limit_s: float = SILENT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s, self._clock = limit_s, clock
        self._polled_at = clock()
        self._silent_s: dict[int, float] = {}

    def note_message(self, node: int) -> None:
        """A message came from a node. The first one begins the watch."""
        self._silent_s[node] = 0.0

    def forget(self, node: int) -> None:
        """Stop watching a node."""
        self._silent_s.pop(node, None)

    def poll(self) -> list[int]:
        """The nodes that have been silent for too long."""
        now = self._clock()
        passed_s, self._polled_at = min(now - self._polled_at, LONGEST_POLL_S), now
        for node in self._silent_s:
            self._silent_s[node] += passed_s
        return [node for node, silent_s in self._silent_s.items() if silent_s > self.limit_s]
