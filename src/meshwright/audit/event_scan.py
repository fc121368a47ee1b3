"""Reads ``events.jsonl`` once and parses only the lines that are needed.

Most lines are steps, one per rank, and only rank 0's are needed. The event writer starts every line with the
same keys in the same order, so lines of other ranks are skipped without parsing. A line in any other form is
parsed as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.audit.record import RunRecord, feed_checked
from meshwright.core.events import EVENTS_VERSION, Event, parse_event

_HEAD = re.compile(
    rb'\{"v":%d,"event":"step","time":[^,]+,"rank":(\d+),"generation":(\d+),"step":(\d+),' % EVENTS_VERSION
)
_STEP_S = re.compile(rb'"step_s":([0-9.eE+-]+)[,}]')


@dataclass
class Scan:
    """Counts lines that are not events."""

    unreadable: int = 0
    """Lines that are truncated, not JSON, or of another version."""


def scan_events(
    path: Path, scan: Scan, shortcut: Callable[[bytes, int], bool] | None = None
) -> Iterator[Event]:
    """Events in file order, without the steps of ranks other than 0.

    Args:
        path: The file.
        scan: Counts unreadable lines.
        shortcut: Called with each step line of rank 0 and its generation; if it returns True, the line is not
            parsed.
    """
    with path.open("rb") as file:
        for line in file:
            head = _HEAD.match(line)
            if head is not None and line.endswith(b"}\n"):
                if head[1] != b"0" or (shortcut is not None and shortcut(line, int(head[2]))):
                    continue
            elif not line.strip():
                continue
            event = parse_event(line)
            if event is None:
                scan.unreadable += 1
            elif event["event"] != "step" or event.get("rank") == 0:
                yield event


@dataclass
class Attempt:
    """One start of the ranks: the first, or a resume in the same folder."""

    generation: int
    began: float | None = None
    ended: float | None = None
    host: str = ""
    torch: str = ""
    ranks: set[int] = field(default_factory=set)
    resumed_at: int | None = None
    last_step: int = 0
    steps: int | None = None
    """The last step of the job."""
    errors: list[str] = field(default_factory=list)
    """Error messages of ranks; the likely cause comes first."""
    record: RunRecord = field(default_factory=RunRecord)

    @property
    def status(self) -> str:
        """How the attempt ended, according to its events."""
        return self.record.outcome

    def feed(self, event: Event) -> None:
        """Take in one event of this attempt."""
        feed_checked(self.record, event)
        name, rank, when = event["event"], event.get("rank"), event.get("time")
        if isinstance(when, int | float):
            self.began = when if self.began is None else min(self.began, when)
            self.ended = when if self.ended is None else max(self.ended, when)
        if isinstance(rank, int):
            self.ranks.add(rank)
        step = event.get("step")
        if name == "started" and rank == 0:
            self.host, self.torch = str(event.get("host", "")), str(event.get("torch", ""))
        elif name == "resumed" and isinstance(step, int):
            self.resumed_at = step
        elif name == "ready" and isinstance(event.get("steps"), int):
            self.steps = event["steps"]
        elif name == "error":
            self._on_error(event)
        if name in ("step", "resumed", "finished") and isinstance(step, int):
            self.last_step = max(self.last_step, step)

    def _on_error(self, event: Event) -> None:
        message = str(event.get("message") or event.get("kind") or "unknown").splitlines()[0]
        sentence = f"rank {event.get('rank')}: {message}"
        if event.get("peer_lost"):  # another rank failed before
            self.errors.append(sentence)
        else:
            self.errors.insert(0, sentence)


class LastAttempt:
    """Reads a log and keeps only its newest attempt, with as little parsing as possible."""

    def __init__(self) -> None:
        self.attempt = Attempt(0)
        self.attempts = 0
        self.began: float | None = None
        """When the first attempt began."""
        self._newest_step = b""

    def read(self, path: Path) -> int:
        """Read a whole file; returns the number of unreadable lines."""
        scan = Scan()
        for event in scan_events(path, scan, self._note_step):
            self._select_attempt(event.get("generation", 0))
            if event.get("generation", 0) == self.attempt.generation:
                self.attempt.feed(event)
                self.began = self.attempt.began if self.began is None else self.began
        self._parse_last_step()
        return scan.unreadable

    def _select_attempt(self, generation: int) -> None:
        if generation > self.attempt.generation or not self.attempts:
            self.attempt = Attempt(generation)
            self.attempts += 1
            self._newest_step = b""

    def _note_step(self, line: bytes, generation: int) -> bool:
        """Record a step's duration and keep the line; only the newest line is parsed."""
        found = _STEP_S.search(line)
        if found is None:
            return False
        self._select_attempt(generation)
        if generation == self.attempt.generation:
            self.attempt.record.step_times_s.append(float(found[1]))
            self._newest_step = line
        return True

    def _parse_last_step(self) -> None:
        """Parse the newest step line; its duration is already recorded."""
        event = parse_event(self._newest_step) if self._newest_step else None
        if event is not None:
            self.attempt.record.step_times_s.pop()
            self.attempt.feed(event)
