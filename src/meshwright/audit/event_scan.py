"""Reads ``events.jsonl`` once and parses only the lines that are needed.

Most lines are steps, one per rank, and only rank 0's are needed. The event writer starts every line with the
same keys in the same order, so lines of other ranks are skipped without parsing. A line in any other form is
parsed as JSON.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.audit.backup_slices import SliceLog
from meshwright.audit.record import RunRecord, feed_checked, reading_events
from meshwright.core.events import EVENTS_FILE, EVENTS_VERSION, Event, parse_event

_HEAD = re.compile(
    rb'\{"v":%d,"event":"step","time":([0-9.eE+]+),"rank":(\d+),"generation":(\d+),"step":(\d+),'
    rb'"loss":(null|[0-9.eE+-]+),' % EVENTS_VERSION
)
_STEP_S = re.compile(rb'"step_s":([0-9.eE+-]+)[,}]')


@dataclass
class Scan:
    """Counts and errors of an event file, most of whose lines are not parsed."""

    unreadable: int = 0
    """Lines that are truncated, not JSON, or of another version."""
    slices: SliceLog | None = None
    """Counts the slices whose gradients were used, if there is one."""


StepReader = Callable[[re.Match[bytes], bytes], bool]
"""Takes a step line of rank 0, and its head: time, rank, generation, step and loss."""


def scan_events(path: Path, scan: Scan, read_step: StepReader | None = None) -> Iterator[Event]:
    """Events in file order, without the steps of ranks other than 0.

    Args:
        path: The file.
        scan: Counts unreadable lines.
        read_step: Called with each step line of rank 0; if it returns True, the line is not parsed.
    """
    with path.open("rb") as file:
        for line in file:
            head = _HEAD.match(line)
            if head is not None and line.endswith(b"}\n"):
                if scan.slices is not None:
                    scan.slices.read(int(head[2]), line)
                if head[2] != b"0" or (read_step is not None and read_step(head, line)):
                    continue
            elif not line.strip():
                continue
            event = parse_event(line)
            if event is None:
                scan.unreadable += 1
                continue
            if scan.slices is not None and head is None and event["event"] == "step" and "slice" in event:
                scan.slices.add(event["rank"], event["slice"])
            if event["event"] != "step" or event.get("rank") == 0:
                yield event


def read_record(run_dir: Path) -> RunRecord:
    """The record of a run over all attempts in its folder.

    Raises:
        UserError: It is not a run folder, or cannot be read.
    """
    record, scan = RunRecord(), Scan()
    with reading_events(run_dir):
        for event in scan_events(run_dir / EVENTS_FILE, scan):
            feed_checked(record, event)
    if scan.unreadable:
        lines = f"{scan.unreadable} lines of {EVENTS_FILE}"
        record.notes.append(f"{lines} are truncated or of another version, and were skipped")
    return record


@dataclass
class Attempt:
    """One start of the ranks: the first, or a resume in the same folder."""

    generation: int
    """Its first."""
    began: float | None = None
    ended: float | None = None
    host: str = ""
    torch: str = ""
    ranks: set[int] = field(default_factory=set)
    resumed_at: int | None = None
    last_step: int = 0
    steps: int | None = None
    """The last step of the job."""
    causes: list[str] = field(default_factory=list)
    """Error messages of ranks."""
    consequences: list[str] = field(default_factory=list)
    """Error messages of ranks that ended because another rank had failed."""
    record: RunRecord = field(default_factory=RunRecord)

    @property
    def errors(self) -> list[str]:
        """Error messages of ranks that failed by themselves; without one, those of the other ranks."""
        return self.causes or self.consequences

    @property
    def status(self) -> str:
        """How the attempt ended, according to its events."""
        return "layout changed" if self.record.layout_changes else self.record.outcome

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
        elif name in ("resumed", "resharded") and isinstance(step, int):
            self.resumed_at = step
        elif name == "ready" and isinstance(event.get("steps"), int):
            self.steps = event["steps"]
        elif name == "error":
            self._on_error(event)
        if name in ("step", "resumed", "resharded", "finished") and isinstance(step, int):
            self.last_step = max(self.last_step, step)

    def _on_error(self, event: Event) -> None:
        message = str(event.get("message") or event.get("kind") or "unknown").splitlines()[0]
        sentence = f"rank {event.get('rank')}: {message}"
        if event.get("peer_lost"):  # another rank failed before
            self.consequences.append(sentence)
        else:
            self.causes.insert(0, sentence)


class RunScan:
    """Reads a log with as little parsing as possible: of all steps but the newest only loss and time."""

    def __init__(self) -> None:
        self.record = RunRecord()
        """The record of all attempts, without MFU."""
        self.attempt = Attempt(-1)
        """The newest."""
        self.began: float | None = None
        """When the first attempt began."""
        self._newest_step = b""

    def read(self, path: Path) -> int:
        """Read a whole file; returns the number of unreadable lines."""
        scan = Scan()
        for event in scan_events(path, scan, self._read_step):
            feed_checked(self.record, event)
            self._follow(event)
        last = parse_event(self._newest_step) if self._newest_step else None
        if last is not None and last["generation"] >= self.record.newest.attempt_start:
            self.record.tokens_per_step = last.get("tokens") or self.record.tokens_per_step
            self._follow(last)
        return scan.unreadable

    def _follow(self, event: Event) -> None:
        """Feed the newest attempt."""
        if self.record.newest.attempt_start > self.attempt.generation:
            self.attempt = Attempt(self.record.newest.attempt_start)
        if event.get("generation", 0) >= self.attempt.generation:
            self.attempt.feed(event)
            self.began = self.attempt.began if self.began is None else self.began

    def _read_step(self, head: re.Match[bytes], line: bytes) -> bool:
        found = _STEP_S.search(line)
        if found is None:
            return False
        generation = int(head[3])
        loss = math.nan if head[5] == b"null" else float(head[5])
        self.record.feed_step(generation, float(head[1]), int(head[4]), loss, float(found[1]))
        if generation >= self.record.newest.generation:
            self._newest_step = line
        return True
