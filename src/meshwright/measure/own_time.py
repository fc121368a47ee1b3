"""Divides the time of a rank into its own work and the time in which it waits for other ranks.

A synchronous step takes as long on every rank: the ranks that are done early wait for the slow one in
collectives. The own time is the rest. Of ranks with equal work, a straggler is the one with more own time.

All waits of Python code end in ``Work.wait``, which the flight recorder observes, or in the operator of
functional collectives. DDP's reducer waits in C++, at the end of the backward pass: the time from the last
bucket, which is complete when all gradients are, to the end of the pass counts as waiting.

Linux counts how long a thread was ready and had no CPU. On a machine with more processes than cores this is
the noise of the own time, so it is reported apart.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

KINDS = {"waiting for data": "data", "checkpoint": "storage"}
"""What the own time of a phase is spent on; all other phases compute."""
SHORT_WAIT_NS = 200_000
"""Shorter waits are not looked at: reading the run queue takes a few microseconds."""
SCHEDSTAT = "/proc/thread-self/schedstat"
"""CPU time, time in the run queue (both in ns) and number of time slices of the calling thread."""


class OwnTime:
    """The own time of this rank since the last report, by kind, and the time that it waited."""

    def __init__(self) -> None:
        self._own_ns = {"compute": 0, "data": 0, "storage": 0}
        self._waited_ns = 0
        self._kind = "compute"
        self._since_ns = time.monotonic_ns()
        """Begin of the own time that is not added up yet."""
        self._issued_ns = 0
        """When the last asynchronous collective was issued, if nothing waited since."""
        self._queue = RunQueue()
        self._queued_ns = self._queue.read_ns()
        """Time in the run queue until the last report."""
        self._wait_queued_ns = 0
        """The same at the begin of a wait."""

    def enter(self, phase: str, now_ns: int) -> None:
        """Another phase begins."""
        if self._issued_ns and phase != "backward":  # the reducer has waited for its buckets
            self._add(self._issued_ns)
            self.end_wait(now_ns)
        self._add(now_ns)
        self._kind = KINDS.get(phase, "compute")
        self._issued_ns = 0

    def issue(self, now_ns: int, in_backward: bool) -> None:
        """An asynchronous collective begins."""
        self._issued_ns = now_ns if in_backward else 0
        if in_backward:
            self._wait_queued_ns = self._queue.read_ns()

    def begin_wait(self, now_ns: int) -> None:
        """The rank waits for others from now on."""
        self._issued_ns = 0
        self._add(now_ns)
        self._wait_queued_ns = self._queue.read_ns()

    def end_wait(self, now_ns: int) -> None:
        """The wait is over. Time without a CPU in it is not that of the rank's work."""
        waited_ns = now_ns - self._since_ns
        self._waited_ns += waited_ns
        self._since_ns = now_ns
        if waited_ns > SHORT_WAIT_NS:
            self._queued_ns += self._queue.read_ns() - self._wait_queued_ns

    def take(self) -> dict[str, float]:
        """Seconds since the last call by what they were spent on: ``spent_s`` of a ``step`` event.

        ``preempted`` is the time without a CPU. It is taken off the compute time, where most of it is.
        """
        self._add(time.monotonic_ns())
        queued_ns = self._queue.read_ns()
        preempted_ns = min(self._own_ns["compute"], max(0, queued_ns - self._queued_ns))
        self._queued_ns = queued_ns
        self._own_ns["compute"] -= preempted_ns
        spent_ns = {**self._own_ns, "preempted": preempted_ns, "waiting": self._waited_ns}
        self._own_ns, self._waited_ns = dict.fromkeys(self._own_ns, 0), 0
        return {kind: round(spent / 1e9, 6) for kind, spent in spent_ns.items()}

    def close(self) -> None:
        """Close the file of the run queue."""
        self._queue.close()

    def _add(self, now_ns: int) -> None:
        """Add the own time until now."""
        now_ns = max(now_ns, self._since_ns)
        self._own_ns[self._kind] += now_ns - self._since_ns
        self._since_ns = now_ns


class ProcessTime(NamedTuple):
    """The time of this process, of all its threads together."""

    cpu_s: float
    queued_s: float
    """Ready without a CPU, in threads that have not ended; 0 where the system does not count it."""

    def since(self, earlier: ProcessTime) -> ProcessTime:
        """The time since another reading."""
        return ProcessTime(self.cpu_s - earlier.cpu_s, self.queued_s - earlier.queued_s)


def read_process_time() -> ProcessTime:
    """The time until now."""
    queued_ns = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        for thread in Path("/proc/self/task").iterdir():
            queued_ns += int((thread / "schedstat").read_bytes().split()[1])
    return ProcessTime(time.process_time(), queued_ns / 1e9)


def estimate_uncontended_s(wall_s: Sequence[float], spent: Sequence[ProcessTime]) -> float:
    """Time of repetitions minus run-queue wait (schedstat): about their time on an otherwise idle machine.

    It is at least the CPU time: waits of several threads at once would count more than once. The median over
    the quarter with the smallest share of time in run queues.

    Args:
        wall_s: Time of each repetition.
        spent: Of each repetition, on the rank that has most.
    """
    pairs = sorted(zip(wall_s, spent, strict=True), key=lambda pair: pair[1].queued_s / pair[0])
    return statistics.median(
        max(wall - time.queued_s, time.cpu_s) for wall, time in pairs[: -(-len(pairs) // 4)]
    )


class RunQueue:
    """How long the thread that made this object has been ready without a CPU."""

    def __init__(self) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open(SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)

    def read_ns(self) -> int:
        """The time so far; 0 where the system does not count it."""
        if self._fd < 0:
            return 0
        try:
            return int(os.pread(self._fd, 96, 0).split()[1])
        except (OSError, ValueError, IndexError):
            return 0

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
