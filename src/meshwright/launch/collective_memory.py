"""Memory for the collectives of the ranks of one host: a memfd that their agent creates for each generation.

The agent holds it open, and ranks map it, so nothing is left in a file system when any of them is killed. A
process that missed the end of its generation still has the memory of that one, and cannot write to the next.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

MEMORY_NAME = "meshwright-collectives"
"""Name of the memfd, shown in ``/proc/PID/fd``."""


class CollectiveMemory:
    """The agent's end: the memory of the newest generation."""

    def __init__(self) -> None:
        self._fd = -1
        self._generation = -1

    def path(self, generation: int) -> str:
        """Where ranks open the memory of a generation. A newer generation gets new memory."""
        if generation > self._generation:
            self.close()
            self._fd = os.memfd_create(_name(generation), os.MFD_CLOEXEC)
            self._generation = generation
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Close this process's reference."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class MappedMemory:
    """The memory in the process of a rank."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd, self._path = fd, path

    @classmethod
    def open(cls, path: str, generation: int) -> MappedMemory | None:
        """Open the memory of a generation; None if the agent has closed it: the generation is over."""
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if Path(f"/proc/self/fd/{fd}").readlink().name.split()[0] == f"memfd:{_name(generation)}":
                return cls(fd, path)
            os.close(fd)
        return None

    @property
    def identity(self) -> str:
        """Equal for ranks that have the same memory."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {self._path} {os.fstat(self._fd).st_ino}"

    def map(self, size: int) -> mmap.mmap:
        """Map the memory; all ranks set the same size."""
        os.ftruncate(self._fd, size)
        return mmap.mmap(self._fd, size)

    def close(self) -> None:
        """Close the descriptor; the mapping stays."""
        os.close(self._fd)


def _name(generation: int) -> str:
    return f"{MEMORY_NAME}-{generation}"
