"""Wall clocks of single ranks, ahead or behind: a small C library that is preloaded into a run.

The library adds an offset to the wall clock of the processes that a shared file lists. It leaves monotonic
clocks as they are. It is compiled with ``cc`` when it is needed.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).parent / "clock_shim.c"
TABLE_VARIABLE = "MESHWRIGHT_CLOCK_TABLE"
SLOT = struct.Struct("<qq")
"""Process and offset in nanoseconds, as in the C source."""
SLOTS = 64


class ShiftedClocks:
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

    def shift(self, pid: int, by_s: float) -> None:
        """Let the wall clock of a process differ from now on."""
        slot = self._slots.setdefault(pid, len(self._slots))
        self._map[slot * SLOT.size : (slot + 1) * SLOT.size] = SLOT.pack(pid, round(by_s * 1e9))


def build_clock_library(folder: Path) -> Path | str:
    """Compile the library; returns its path, or why there is none."""
    return build_library(SOURCE, folder)


def build_library(source: Path, folder: Path) -> Path | str:
    """Compile a C source to a shared library; returns its path, or why there is none."""
    compiler = shutil.which("cc")
    if compiler is None:
        return "there is no C compiler: cc was not found"
    library = folder / f"{source.stem}.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    return library if built.returncode == 0 else f"cc failed: {built.stderr.strip().splitlines()[-1]}"
