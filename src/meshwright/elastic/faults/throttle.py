"""Slows down a process from outside: SIGSTOP and SIGCONT in turn, a few milliseconds each.

A process that runs for two thirds of the time takes 1.5 times as long for its work. The stops are as long as
the measured time between them demands, because the scheduler of a busy machine delays this thread, too.
"""

from __future__ import annotations

import signal
import threading
import time

from meshwright.elastic.faults.injector import is_alive, send_signal

RUN_S = 0.02
"""How long the process runs between two stops."""


class Throttle:
    """Slows down one process until it is ended."""

    def __init__(self, pid: int, factor: float) -> None:
        """Begin.

        Args:
            pid: The process.
            factor: How many times as long its work takes.
        """
        self._pid, self._factor = pid, factor
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="throttle", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Let the process run at its own speed again."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        while not self._ended.wait(RUN_S) and is_alive(self._pid):
            now = time.monotonic()
            send_signal(self._pid, signal.SIGSTOP)
            time.sleep((now - began) * (self._factor - 1))
            send_signal(self._pid, signal.SIGCONT)
            began = time.monotonic()
