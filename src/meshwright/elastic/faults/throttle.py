"""Slows down the work of a process from outside, by SIGSTOP and SIGCONT in turn.

For 1.5 times the time, the process is stopped for half as long as its main thread has used a CPU. It is not
stopped while it waits for other ranks: a slow device does not wait longer either.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.elastic.faults.injector import send_signal

POLL_S = 0.001
SHORTEST_STOP_S = 0.002
"""Shorter stops are put together."""


class Throttle:
    """Slows down one process until it ends, or until the end of the throttle."""

    def __init__(self, pid: int, factor: float, is_waiting: Callable[[], bool]) -> None:
        """Begin.

        Args:
            pid: The process.
            factor: How many times as long its work takes.
            is_waiting: Whether it waits for other ranks.
        """
        self._pid, self._factor, self._is_waiting = pid, factor, is_waiting
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="throttle", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Let the process run at its own speed again."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            paid_s = self._read_cpu_s()
            while not self._ended.wait(POLL_S):
                used_s = self._read_cpu_s()
                stop_s = (used_s - paid_s) * (self._factor - 1)
                if stop_s < SHORTEST_STOP_S or self._is_waiting():
                    continue
                send_signal(self._pid, signal.SIGSTOP)
                if not self._is_waiting():
                    time.sleep(stop_s)
                    paid_s = used_s
                send_signal(self._pid, signal.SIGCONT)
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            return

    def _read_cpu_s(self) -> float:
        """CPU time of the main thread."""
        return int(Path(f"/proc/{self._pid}/schedstat").read_text().split()[0]) / 1e9
