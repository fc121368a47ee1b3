"""Ranks whose work takes longer: a small C library that is preloaded into a run.

For 1.5 times the time, a rank sleeps for half as long as its main thread has used a CPU. It does not wait
longer for other ranks: a slow device does not either. Signals from outside (SIGSTOP) would come late on a
busy machine.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.elastic.faults.preloaded import ProcessTable, build_library

SOURCE = Path(__file__).parent / "slow_shim.c"
TABLE_VARIABLE = "MESHWRIGHT_SLOW_TABLE"


class SlowWork(ProcessTable):
    """The extra time of the processes of one run, in thousandths of their work."""

    def __init__(self, library: Path, table: Path) -> None:
        super().__init__(library, table, TABLE_VARIABLE)

    def slow(self, pid: int, factor: float) -> None:
        """Let the work of a process take this many times as long from now on."""
        self.set(pid, round((factor - 1) * 1000))


def build_slow_library(folder: Path) -> Path | str:
    """Compile the library; returns its path, or why there is none."""
    return build_library(SOURCE, folder)
