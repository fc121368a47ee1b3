"""Events: one JSON object per line, written by every rank, read by audit, report and progress.

``events.jsonl`` is the record of a run. Each line is a single ``write`` on a file opened for appending, so
lines of several ranks never mix. A full disk loses lines but never stops training: the writer counts lost
lines, warns once on standard error, and records the gap when there is space again.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EVENTS_VERSION = 1
EVENTS_FILE = "events.jsonl"

Event = dict[str, Any]
Listener = Callable[[Event], None]
Commit = Callable[[], AbstractContextManager[None]]
"""Entered around what other processes will rely on."""


class EventWriter:
    """Appends events of one rank; the listener comes first, so that it works with a full disk."""

    def __init__(
        self,
        path: Path,
        rank: int,
        generation: int = 0,
        listener: Listener | None = None,
        commit: Commit = nullcontext,
    ) -> None:
        """Open nothing yet.

        Args:
            path: Path of the file.
            rank: That writes.
            generation: That it is in.
            listener: Called with every event.
            commit: Entered around each event; raises where the rank must write no more.
        """
        self.rank = rank
        self._commit = commit
        self.generation = generation
        self.lost = 0
        self._listener = listener
        self._path = path
        self._torn = False
        self._fd = -1

    def write(self, event: str, **fields: Any) -> Event:
        """Write one event; returns it."""
        record = {**self._stamp(event), **fields}
        with self._commit():
            if self._listener is not None:
                self._listener(record)
            if self.lost and self._append(self._gap()):
                self.lost = 0
            if not self._append(record):
                self._lose()
        return record

    def relay(self, record: Event) -> None:
        """Append an event that another machine wrote."""
        if not self._append(record):
            self._lose()

    def close(self) -> None:
        """Close the file; a later write opens it again. Reports lost lines to the listener."""
        if self.lost and self._listener is not None:
            self._listener(self._gap())
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _stamp(self, event: str) -> Event:
        now = time.time()
        generation = self.generation
        return {"v": EVENTS_VERSION, "event": event, "time": now, "rank": self.rank, "generation": generation}

    def _gap(self) -> Event:
        return {**self._stamp("events_lost"), "count": self.lost}

    def _append(self, record: Event) -> bool:
        line = to_json(record).encode() + b"\n"
        if self._torn:
            line = b"\n" + line
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            written = os.write(self._fd, line)
        except OSError as error:
            self._error = error
            return False
        self._torn = written < len(line)
        if self._torn:
            self._error = OSError(f"wrote {written} of {len(line)} bytes")
        return not self._torn

    def _lose(self) -> None:
        self.lost += 1
        if self.lost == 1:
            if self._listener is not None:
                self._listener({**self._gap(), "reason": str(self._error)})
            what = f"rank {self.rank}: cannot write {self._path} ({self._error})"
            warn(f"{what}; log lines are lost, training continues")


@dataclass
class EventLog:
    """The contents of ``events.jsonl``."""

    events: list[Event] = field(default_factory=list)
    unreadable: int = 0
    """Lines that are truncated, not JSON, or of another version."""

    def of(self, name: str, generation: int | None = None) -> list[Event]:
        """All events with a name, in file order."""
        return [e for e in self.events if e["event"] == name and generation in (None, e.get("generation"))]

    @property
    def last_generation(self) -> int:
        """The last attempt in the log; 0 for an empty one."""
        return max((e.get("generation", 0) for e in self.events), default=0)


def read_events(path: Path) -> EventLog:
    """Read a log; unreadable lines are skipped and counted."""
    log = EventLog()
    with path.open("rb") as file:
        for line in file:
            if not line.strip():
                continue
            event = parse_event(line)
            if event is None:
                log.unreadable += 1
            else:
                log.events.append(event)
    return log


def parse_event(line: bytes) -> Event | None:
    """The event of a line; None if it is truncated, not JSON, or of another version."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or "event" not in event or event.get("v") != EVENTS_VERSION:
        return None
    return event if isinstance(event.get("generation", 0), int) else None


def to_json(content: Any) -> str:
    """One line of JSON; NaN and infinity become null."""
    try:
        return json.dumps(content, separators=(",", ":"), default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(content), separators=(",", ":"), default=str)


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def name_phase(phase: str, preempted: bool) -> str:
    """The phase of an event ``straggler``, and whether the rank had no core when it was late."""
    return f"{phase} (preempted: other processes used its core)" if preempted else phase


def warn(message: str) -> None:
    """Print to standard error; errors of a closed or full one are ignored."""
    try:
        sys.stderr.write(f"meshwright: {message}\n")
        sys.stderr.flush()
    except OSError:
        pass
