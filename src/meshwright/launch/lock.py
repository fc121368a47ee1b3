"""A lock on the run's folder, released by the system when its process ends."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from meshwright.core.errors import Problem, UserError

LOCK_FILE = "lock"


@dataclass(frozen=True)
class RunLock:
    """The lock, held from ``take`` to the end of the ``with`` block."""

    fd: int

    @classmethod
    def take(cls, run_dir: Path) -> RunLock:
        """Lock a folder.

        Raises:
            UserError: Another process has the lock.
        """
        fd = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 64).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            rule = f"is in use by another meshwright (process {holder})"
            fix = "Wait for it, or use another run_dir"
            raise UserError(Problem("run-busy", rule, path=str(run_dir), fix=fix)) from None
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        return cls(fd)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.fd)


def is_held(run_dir: Path) -> bool:
    """Whether a process has the lock; takes a shared lock briefly and writes nothing."""
    try:
        fd = os.open(run_dir / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(fd)
    return False
