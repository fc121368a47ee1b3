"""Wall clocks of single ranks, ahead or behind: a small C library that is preloaded into a run.

The library adds an offset to the wall clock of the processes that a shared file lists. It leaves monotonic
clocks as they are.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.elastic.faults.preloaded import ProcessTable, build_library

SOURCE = Path(__file__).parent / "clock_shim.c"
TABLE_VARIABLE = "MESHWRIGHT_CLOCK_TABLE"


class ShiftedClocks(ProcessTable):
    """The offsets of one run, in nanoseconds."""

    def __init__(self, library: Path, table: Path) -> None:
        super().__init__(library, table, TABLE_VARIABLE)

    def shift(self, pid: int, by_s: float) -> None:
        """Let the wall clock of a process differ from now on."""
        self.set(pid, round(by_s * 1e9))


def build_clock_library(folder: Path) -> Path | str:
    """Compile the library; returns its path, or why there is none."""
    return build_library(SOURCE, folder)
