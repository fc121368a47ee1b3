"""A running run seen from outside: its events as they are written, and the flight recorders of its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from meshwright.core.events import EVENTS_FILE, Event, parse_event
from meshwright.core.flight_ring import FlightMemory, RankProgress


@dataclass
class RankProcess:
    """The newest process of a rank."""

    pid: int
    memory: FlightMemory | None
    """None once the recorder cannot be opened: the rank has ended."""


@dataclass
class RunView:
    """Reads the events of a run, and where its ranks are. Writes nothing."""

    run_dir: Path
    events: list[Event] = field(default_factory=list)
    ranks: dict[int, RankProcess] = field(default_factory=dict)
    steps_done: int = 0
    """The furthest step that rank 0 has done."""
    generation: int = 0
    first_step_at: float | None = None
    """Wall-clock time of the first step of rank 0."""
    _offset: int = 0
    _rest: bytes = b""

    def poll(self) -> list[Event]:
        """Read what was written since; returns the new events."""
        try:
            with (self.run_dir / EVENTS_FILE).open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        new = [event for event in map(parse_event, lines) if event is not None]
        for event in new:
            self._note(event)
        self.events += new
        return new

    def _note(self, event: Event) -> None:
        self.generation = max(self.generation, event["generation"])
        if event["event"] == "started":
            self._open(event)
        elif event["event"] == "step" and event["rank"] == 0:
            self.steps_done = max(self.steps_done, event["step"])
            if self.first_step_at is None:
                self.first_step_at = event["time"]

    def _open(self, event: Event) -> None:
        rank, path = event["rank"], event.get("flight_recorder")
        before = self.ranks.get(rank)
        if before is not None and before.memory is not None:
            before.memory.close()
        try:
            memory = FlightMemory.open(path) if path else None
        except (OSError, ValueError):
            memory = None
        self.ranks[rank] = RankProcess(event["pid"], memory)

    def progress(self, rank: int) -> RankProgress | None:
        """Where a rank is; None if it has not started."""
        found = self.ranks.get(rank)
        return None if found is None or found.memory is None else found.memory.progress()

    def of(self, name: str) -> list[Event]:
        """The events with a name, in file order."""
        return [event for event in self.events if event["event"] == name]

    def close(self) -> None:
        """Free the memories."""
        for process in self.ranks.values():
            if process.memory is not None:
                process.memory.close()
        self.ranks = {}
