"""Turns SIGINT, SIGTERM and SIGHUP into a flag that the ranks agree on at the end of a step."""

from __future__ import annotations

import signal


class StopSignal:
    """Whether this rank was asked to stop; the control all-reduce sums it over all ranks."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> None:
        """Set the flag on a signal from now on."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            hangup = number == signal.SIGHUP
            if not (hangup and signal.getsignal(number) is signal.SIG_IGN):  # nohup, or our supervisor
                signal.signal(number, self._request)

    def _request(self, *_: object) -> None:
        self.requested = True
