"""A small C library that is preloaded into all processes of a run, and the table that it reads.

The table is a shared file with a slot per process: its number and a value. The library is compiled with
``cc`` when it is needed.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

SLOT = struct.Struct("<qq")
"""Process and value, as in the C sources."""
SLOTS = 64


class ProcessTable:
    """The table of one run."""

    def __init__(self, library: Path, table: Path, variable: str) -> None:
        """Create an empty table.

        Args:
            library: To preload.
            table: A new file.
            variable: The environment variable in which the library finds it.
        """
        self._library, self._path, self._variable = library, table, variable
        table.write_bytes(bytes(SLOT.size * SLOTS))
        with table.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SLOT.size * SLOTS)
        self._slots: dict[int, int] = {}

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of the command."""
        return {"LD_PRELOAD": str(self._library), self._variable: str(self._path)}

    def set(self, pid: int, value: int) -> None:
        """Set the value of a process."""
        at = self._slots.setdefault(pid, len(self._slots)) * SLOT.size
        # The process first sees the slot when its number is there: write the value before.
        self._map[at + 8 : at + SLOT.size] = struct.pack("<q", value)
        self._map[at : at + 8] = struct.pack("<q", pid)


def build_library(source: Path, folder: Path) -> Path | str:
    """Compile a C source to a shared library; returns its path, or why there is none."""
    compiler = shutil.which("cc")
    if compiler is None:
        return "there is no C compiler: cc was not found"
    library = folder / f"{source.stem}.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    return library if built.returncode == 0 else f"cc failed: {built.stderr.strip().splitlines()[-1]}"
