"""Watches the ranks of this machine from outside: flight recorders, process state and CPU time.

Ages are measured here, as the time since a value was seen to change. A clock that jumps in a rank changes
nothing. If the watcher itself was paused, the pause counts as one poll.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.flight_ring import HEARTBEAT_S, FlightMemory, RankProgress
from meshwright.elastic.hang import RankState, Verdict, find_hang

LONGEST_POLL_S = 2.0
"""A longer pause between two polls is the watcher's own."""
ASKED_LIMIT_S = 3 * HEARTBEAT_S
"""Age at which a rank is reported as silent or stuck to a user who asks."""
BUSY_TICKS = 2
"""CPU time between two polls, in clock ticks of 10 ms, of a rank that computes."""
TRANSPORT_THREADS = "(gloo"
"""Threads that poll connections all the time: 1.5 ms per second each."""


@dataclass(frozen=True)
class ProcessStatus:
    """A process in ``/proc``."""

    state: str
    """``R``, ``S``, ``D``, ``T`` (stopped), ``t`` (traced by a debugger) ...; empty if it is gone."""
    cpu_ticks: int = 0
    """Of all threads, except those of the transport."""
    has_children: bool = False
    """Compilers run in child processes."""

    @classmethod
    def read(cls, pid: int) -> ProcessStatus:
        """The current status of a process."""
        threads = Path(f"/proc/{pid}/task")
        try:
            state = (threads / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
            children = (threads / str(pid) / "children").read_text()
            ticks = sum(_count_ticks(thread) for thread in threads.iterdir())
        except (FileNotFoundError, ProcessLookupError):
            return cls("")
        return cls("" if state in ("Z", "X") else state, ticks, bool(children.strip()))


def _count_ticks(thread: Path) -> int:
    """CPU time of a thread; none of one that is gone or belongs to the transport."""
    try:
        name, _, rest = (thread / "stat").read_text().rpartition(")")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = rest.split()
    return 0 if TRANSPORT_THREADS in name else int(fields[11]) + int(fields[12])


@dataclass
class _Seen:
    """What the last poll saw of a rank."""

    heartbeat_ns: int = 0
    written: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Step, phase changes, calls and begin of the wait."""
    cpu_ticks: int = 0
    stopped: bool = False
    silent_s: float = 0.0
    idle_s: float = 0.0
    exit: str = ""


class RankWatch:
    """Polls the flight recorders of all ranks."""

    def __init__(
        self,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        read_status: Callable[[int], ProcessStatus] = ProcessStatus.read,
    ) -> None:
        """Start to watch.

        Args:
            timeout_s: Within this time a silent or stuck rank is found; 0 to find none by itself.
            clock: A monotonic clock.
            read_status: Reads the status of a process.
        """
        self._timeout_s, self._clock, self._read_status = timeout_s, clock, read_status
        self._memories: dict[int, FlightMemory] = {}
        self._seen: dict[int, _Seen] = {}
        self._polled_at = clock()
        self._stalled_s = 0.0
        self._reported: set[tuple[str, int | None, int]] = set()

    def add(self, rank: int, memory: FlightMemory) -> None:
        """Watch a rank, or its replacement."""
        if rank in self._memories:
            self._memories[rank].close()
        self._memories[rank], self._seen[rank] = memory, _Seen()

    def close(self) -> None:
        """Free the memories."""
        for memory in self._memories.values():
            memory.close()
        self._memories, self._seen = {}, {}

    @property
    def limit_s(self) -> float:
        """Age at which a rank is silent or stuck: less than the timeout by a heartbeat and two polls."""
        return max(self._timeout_s - 3 * HEARTBEAT_S, self._timeout_s / 2)

    def age_s(self, rank: int) -> float | None:
        """Time since the last sign of life of a rank, which its process may have left; None if unknown."""
        flight = self._memories[rank].read() if rank in self._memories else None
        if flight is None:
            return None
        progress = flight.progress
        signs = [progress.heartbeat_ns, progress.phase_begin_ns, progress.wait_begin_ns]
        signs += [max(record.begin_ns, record.end_ns) for record in flight.records[-1:]]
        return (time.monotonic_ns() - max(signs)) / 1e9 if max(signs) else None

    def poll(self) -> Verdict | None:
        """Look at all ranks, at most twice a second; returns a new verdict if the run is stuck."""
        now = self._clock()
        if now - self._polled_at < HEARTBEAT_S:
            return None
        passed_s, self._polled_at = min(now - self._polled_at, LONGEST_POLL_S), now
        changed = False
        for rank, memory in self._memories.items():
            seen = self._seen[rank]
            progress = memory.progress()
            if progress is not None and progress.phase != "finished" and not seen.exit:
                changed |= self._update(seen, progress, passed_s)
        self._stalled_s = 0.0 if changed else self._stalled_s + passed_s
        limit_s = self.limit_s
        silent = any(seen.silent_s >= limit_s for seen in self._seen.values())
        if not self._timeout_s or not (silent or self._stalled_s >= limit_s):
            return None
        verdict = self.judge(limit_s)
        key = (verdict.cause, verdict.rank, verdict.step)
        if not verdict.is_hang or key in self._reported:
            return None
        self._reported.add(key)
        return verdict

    def judge(self, limit_s: float = ASKED_LIMIT_S, exits: Mapping[int, str] | None = None) -> Verdict:
        """What the run waits for now.

        Args:
            limit_s: Age at which a rank is silent or stuck.
            exits: How ranks ended, where it is known.
        """
        states = [
            RankState(
                rank,
                self._memories[rank].read(),
                (exits or {}).get(rank, s.exit),
                s.stopped,
                s.silent_s,
                s.idle_s,
            )
            for rank, s in self._seen.items()
        ]
        return find_hang(states, time.monotonic_ns(), limit_s)

    def _update(self, seen: _Seen, progress: RankProgress, passed_s: float) -> bool:
        """Compare with the last poll; returns whether the recorder made progress."""
        written = (progress.step, progress.phase_changes, progress.calls, progress.wait_begin_ns)
        changed, seen.written = written != seen.written, written
        beats, seen.heartbeat_ns = progress.heartbeat_ns != seen.heartbeat_ns, progress.heartbeat_ns
        if changed:
            seen.stopped, seen.silent_s, seen.idle_s = False, 0.0, 0.0
            return True
        status = self._read_status(progress.pid)
        if not status.state:
            seen.exit = "its process is gone"
            return False
        busy = status.cpu_ticks - seen.cpu_ticks >= BUSY_TICKS or status.has_children or status.state == "t"
        seen.silent_s = 0.0 if beats or busy else seen.silent_s + passed_s
        seen.idle_s = 0.0 if busy else seen.idle_s + passed_s
        seen.stopped, seen.cpu_ticks = status.state == "T", status.cpu_ticks
        return False
