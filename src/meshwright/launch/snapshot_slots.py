"""Memory of a rank's in-memory snapshots: a memfd with two slots, of which one is always complete.

The agent creates it and keeps it open, so it outlives the rank. The rank sets its size and writes the slots
(``checkpoint.state_snapshots``). The header says which step each slot holds.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass

from meshwright.layout.snapshot_size import SLOTS, reserved_bytes
from meshwright.spec.cluster import machine_memory_bytes

EMPTY = -1
"""Step of a slot that is being written, or was never written."""
_HEADER = struct.Struct(f"<8sq{SLOTS}q")
_MAGIC = b"mwsnap01"


@dataclass(frozen=True)
class SnapshotSlots:
    """The memfd of one rank."""

    fd: int

    @classmethod
    def create(cls, rank: int) -> SnapshotSlots:
        """A new, empty one."""
        return cls(os.memfd_create(f"snapshots of rank {rank}"))

    @classmethod
    def open(cls, path: str) -> SnapshotSlots:
        """Open the memory of the agent in the process of the rank."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    @property
    def path(self) -> str:
        """Where the rank opens it."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def reserve(self, slot_bytes: int) -> None:
        """Make room for two slots. All pages are allocated now.

        Raises:
            OSError: There is not enough memory.
        """
        size = reserved_bytes(slot_bytes)
        if size > (available := machine_memory_bytes()):
            raise OSError(errno.ENOMEM, f"{size} bytes are needed, {available} are available")
        os.posix_fallocate(self.fd, 0, size)
        self._write_header(slot_bytes, [EMPTY] * SLOTS)

    @property
    def reserved_bytes(self) -> int:
        """Size of the memory; 0 before ``reserve``."""
        return os.fstat(self.fd).st_size

    @property
    def slot_bytes(self) -> int:
        """Size of a slot; 0 before ``reserve``."""
        return self._read_header()[0]

    def steps(self) -> list[int]:
        """The step of each slot, ``EMPTY`` for one that is not complete."""
        return self._read_header()[1]

    def set_step(self, slot: int, step: int) -> None:
        """Mark a slot as complete, or as ``EMPTY`` before it is written."""
        size, steps = self._read_header()
        steps[slot] = step
        self._write_header(size, steps)

    def copy(self, rank: int) -> SnapshotSlots:
        """A copy that the process of the original cannot write to."""
        copied, size = SnapshotSlots.create(rank), os.fstat(self.fd).st_size
        if size:
            os.posix_fallocate(copied.fd, 0, size)
        done = 0
        while done < size:
            done += os.sendfile(copied.fd, self.fd, done, size - done)
        return copied

    def close(self) -> None:
        """Close this process's reference."""
        os.close(self.fd)

    def _read_header(self) -> tuple[int, list[int]]:
        content = os.pread(self.fd, _HEADER.size, 0)
        if len(content) < _HEADER.size:
            return 0, [EMPTY] * SLOTS
        magic, size, *steps = _HEADER.unpack(content)
        return (size, steps) if magic == _MAGIC else (0, [EMPTY] * SLOTS)

    def _write_header(self, slot_bytes: int, steps: list[int]) -> None:
        os.pwrite(self.fd, _HEADER.pack(_MAGIC, slot_bytes, *steps), 0)


def newest_common_step(steps_by_rank: dict[int, list[int]], world_size: int) -> int | None:
    """The newest step of which every rank has a complete snapshot; None if there is none."""
    if len(steps_by_rank) < world_size:
        return None
    common = set.intersection(*(set(steps) for steps in steps_by_rank.values())) - {EMPTY}
    return max(common, default=None)
