"""Watches ranks from outside: flight recorders, process state and CPU time.

Ages are measured here, as the time since a value was seen to change. A clock that jumps in a rank changes
nothing. If the watcher itself was paused, the pause counts as one poll. Ranks of another machine are watched
there (``NodeWatch``), by that machine's clock; while its agent sends no report, they do not age.
"""

from __future__ import annotations

import base64
import time
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.core.flight_ring import HEARTBEAT_S, SIZE, FlightMemory, RankProgress, RemoteFlight
from meshwright.elastic.hang import RankState, Verdict, find_hang
from meshwright.launch.silence import LONGEST_POLL_S

ON_REQUEST_LIMIT_S = 3 * HEARTBEAT_S
"""Age at which a rank counts as silent or stuck when a user requests a verdict (``meshwright hang``)."""
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
    """CPU time of all threads, except those of the transport."""
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
    """State of a rank in the last poll."""

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
        self._memories: dict[int, FlightMemory | RemoteFlight] = {}
        self._remote_progress = False
        """Whether a rank of another machine made progress since the last poll."""
        self._seen: dict[int, _Seen] = {}
        self._polled_at = clock()
        self._stalled_s = 0.0
        self._reported: set[tuple[int, str, int | None, int]] = set()
        """Generation, cause, rank and step of the verdicts so far."""

    def add(self, rank: int, memory: FlightMemory | RemoteFlight) -> None:
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
        changed, self._remote_progress = self._remote_progress, False
        for rank, memory in self._memories.items():
            if isinstance(memory, FlightMemory):
                changed |= self._look(rank, passed_s, self._read_status)
        self._stalled_s = 0.0 if changed else self._stalled_s + passed_s
        limit_s = self.limit_s
        silent = any(seen.silent_s >= limit_s for seen in self._seen.values())
        if not self._timeout_s or not (silent or self._stalled_s >= limit_s):
            return None
        verdict = self.judge(limit_s)
        key = (self._newest_generation(), verdict.cause, verdict.rank, verdict.step)
        if not verdict.is_hang or key in self._reported:
            return None
        self._reported.add(key)
        return verdict

    def _newest_generation(self) -> int:
        found = [progress for memory in self._memories.values() if (progress := memory.progress())]
        return max((progress.generation for progress in found), default=0)

    def judge(self, limit_s: float = ON_REQUEST_LIMIT_S, exits: Mapping[int, str] | None = None) -> Verdict:
        """The present hang verdict of the run.

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

    def receive(self, report: Mapping[str, Any]) -> None:
        """Take over what the ``NodeWatch`` of another machine saw."""
        passed_s = min(float(report["passed_s"]), LONGEST_POLL_S)
        for name, seen in report["ranks"].items():
            memory = self._memories.get(int(name))
            if isinstance(memory, RemoteFlight):
                memory.update(_unpack(seen["flight"]), report["now_ns"])
                status = ProcessStatus(*seen["status"])
                self._remote_progress |= self._look(int(name), passed_s, partial(_reported, status))

    def _look(self, rank: int, passed_s: float, read_status: Callable[[int], ProcessStatus]) -> bool:
        """Compare the recorder of a rank with the last time; returns whether it made progress."""
        seen, progress = self._seen[rank], self._memories[rank].progress()
        if progress is None or progress.phase == "finished" or seen.exit:
            return False
        return self._update(seen, progress, passed_s, read_status)

    def _update(
        self,
        seen: _Seen,
        progress: RankProgress,
        passed_s: float,
        read_status: Callable[[int], ProcessStatus],
    ) -> bool:
        written = (progress.step, progress.phase_changes, progress.calls, progress.wait_begin_ns)
        changed, seen.written = written != seen.written, written
        beats, seen.heartbeat_ns = progress.heartbeat_ns != seen.heartbeat_ns, progress.heartbeat_ns
        if changed:
            seen.stopped, seen.silent_s, seen.idle_s = False, 0.0, 0.0
            return True
        status = read_status(progress.pid)
        if not status.state:
            seen.exit = "its process is gone"
            return False
        busy = status.cpu_ticks - seen.cpu_ticks >= BUSY_TICKS or status.has_children or status.state == "t"
        seen.silent_s = 0.0 if beats or busy else seen.silent_s + passed_s
        seen.idle_s = 0.0 if busy else seen.idle_s + passed_s
        seen.stopped, seen.cpu_ticks = status.state == "T", status.cpu_ticks
        return False


class NodeWatch:
    """Reports the ranks of this machine to a supervisor on another one."""

    def __init__(self) -> None:
        self._memories: dict[int, FlightMemory] = {}
        self._progress: dict[int, tuple[int, int, int]] = {}
        self._reported_at = time.monotonic()

    def add(self, rank: int, memory: FlightMemory) -> None:
        """Watch a rank, or its replacement."""
        if rank in self._memories:
            self._memories[rank].close()
        self._memories[rank] = memory
        self._progress.pop(rank, None)

    def close(self) -> None:
        """Free the memories."""
        for memory in self._memories.values():
            memory.close()
        self._memories = {}

    @property
    def next_report_s(self) -> float:
        """Time until the next report is due."""
        return max(0.0, self._reported_at + HEARTBEAT_S - time.monotonic())

    def report(self, whole: Collection[int] = ()) -> dict[str, Any]:
        """The report that this node sends to the watch of the supervisor.

        Args:
            whole: Ranks of which all records are sent. Of others they are sent if the rank made no progress.
        """
        now = time.monotonic()
        passed_s, self._reported_at = now - self._reported_at, now
        ranks = {str(rank): self._describe(rank, memory, whole) for rank, memory in self._memories.items()}
        return {"is": "watch", "now_ns": time.monotonic_ns(), "passed_s": passed_s, "ranks": ranks}

    def _describe(self, rank: int, memory: FlightMemory, whole: Collection[int]) -> dict[str, Any]:
        found = memory.progress()
        written = (0, 0, 0) if found is None else (found.step, found.phase_changes, found.calls)
        stuck, self._progress[rank] = written == self._progress.get(rank), written
        status = ProcessStatus("") if found is None else ProcessStatus.read(found.pid)
        flight = base64.b64encode(zlib.compress(memory.copy(stuck or rank in whole), 1)).decode()
        return {"flight": flight, "status": [status.state, status.cpu_ticks, status.has_children]}


def _reported(status: ProcessStatus, _: int) -> ProcessStatus:
    """The status that another machine has sent."""
    return status


def _unpack(content: str) -> bytes:
    """The memory that a node has sent; never more than a flight recorder has."""
    return zlib.decompressobj().decompress(base64.b64decode(content), SIZE)
