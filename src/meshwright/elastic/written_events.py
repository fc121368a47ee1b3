"""Which events of ranks on other nodes are in ``events.jsonl``, for a supervisor that adopts these ranks.

Their agents send again what the previous supervisor may not have handled when it died. Some of it is written.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from meshwright.core.events import Event

TAIL_BYTES = 8 * 2**20
"""Bytes that are read from the end of the file: what agents send again is at most about a second old."""


class WrittenEvents:
    """The last events of a file."""

    def __init__(self, path: Path) -> None:
        """Name the file; it is read when the first event is looked up."""
        self._path = path
        self._found: set[tuple[object, ...]] | None = None

    def __contains__(self, event: Event) -> bool:
        if self._found is None:
            self._found = {_identify(one) for one in _read_tail(self._path)}
        return _identify(event) in self._found


def _identify(event: Event) -> tuple[object, ...]:
    return tuple(event.get(name) for name in ("rank", "generation", "event", "time", "step"))


def _read_tail(path: Path) -> list[Event]:
    found: list[Event] = []
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:  # the first line may be cut, the last one unfinished
                continue
            if isinstance(event, dict):
                found.append(event)
    return found
