"""Ranks whose work takes longer: a small C library that is preloaded into a run.

For 1.5 times the time, a rank sleeps for half as long as its main thread has used a CPU. It does not wait
longer for other ranks: a slow device does not either. Signals from outside (SIGSTOP) would come late on a
busy machine.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path

from meshwright.elastic.faults.clock import SLOT, SLOTS, build_library

SOURCE = Path(__file__).parent / "slow_shim.c"
TABLE_VARIABLE = "MESHWRIGHT_SLOW_TABLE"


class SlowWork:
    """The table of one run."""

    def __init__(self, library: Path, table: Path) -> None:
        self._library, self._path = library, table
        table.write_bytes(bytes(SLOT.size * SLOTS))
        with table.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SLOT.size * SLOTS)
        self._slots: dict[int, int] = {}

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of the command."""
        return {"LD_PRELOAD": str(self._library), TABLE_VARIABLE: str(self._path)}

    def slow(self, pid: int, factor: float) -> None:
        """Let the work of a process take this many times as long from now on."""
        slot = self._slots.setdefault(pid, len(self._slots))
        at = slot * SLOT.size
        # The process first sees the slot when its number is there: write the value before.
        self._map[at + 8 : at + SLOT.size] = struct.pack("<q", round((factor - 1) * 1000))
        self._map[at : at + 8] = struct.pack("<q", pid)


def build_slow_library(folder: Path) -> Path | str:
    """Compile the library; returns its path, or why there is none."""
    return build_library(SOURCE, folder)
