"""Stop requests from signals and commands, as a flag of the control all-reduce; finds short grace times."""

from __future__ import annotations

import signal
from collections.abc import Callable


class StopSignal:
    """Whether this rank was asked to stop; the control all-reduce sums it over all ranks."""

    def __init__(self, is_ordered: Callable[[], bool] = lambda: False) -> None:
        """Start without a signal.

        Args:
            is_ordered: Whether the supervisor has asked for a stop.
        """
        self._signalled, self.is_ordered = False, is_ordered

    @property
    def requested(self) -> bool:
        """Whether a signal came, or the supervisor asked for a stop."""
        return self._signalled or self.is_ordered()

    def install(self) -> None:
        """Set the flag on a signal from now on."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            hangup = number == signal.SIGHUP
            if not (hangup and signal.getsignal(number) is signal.SIG_IGN):  # nohup, or our supervisor
                signal.signal(number, self._request)

    def _request(self, *_: object) -> None:
        self._signalled = True


class StopGrace:
    """Whether a step is longer than the time that a scheduler leaves between SIGTERM and SIGKILL."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s, self._reported = grace_s, False

    def is_newly_exceeded(self, step_s: float) -> bool:
        """Whether this step takes longer, and none did before."""
        newly = step_s > self._grace_s and not self._reported
        self._reported |= newly
        return newly
