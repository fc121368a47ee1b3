"""Locks on folders of runs and of checkpoints, released by the system when the process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from meshwright.core.errors import Problem, UserError
from meshwright.launch.agent_file import AgentFile

LOCK_FILE = "lock"
MAX_BYTES = 8192
_HOLDER = re.compile(rb"\d+ on \S+\n(?:(/.+)\n)?")


@dataclass(frozen=True)
class RunLock:
    """The lock, held from ``take`` to the end of the ``with`` block."""

    fd: int

    @classmethod
    def take(cls, run_dir: Path) -> RunLock:
        """Lock the folder of a run.

        Raises:
            UserError: Another process has the lock.
        """
        fd, holder = _try_to_lock(run_dir)
        if holder is not None:
            fix = "Wait for it, or use another run_dir"
            raise UserError(Problem("run-busy", holder, path=str(run_dir), fix=fix))
        return cls(fd)

    @classmethod
    def take_checkpoints(cls, folder: Path, run_dir: Path | None = None) -> RunLock:
        """Lock a folder of checkpoints: only one run writes there.

        Args:
            folder: Folder of the checkpoints.
            run_dir: Folder of the run that writes there.

        Raises:
            UserError: Another process has the lock, or had it, and its ranks still train.
        """
        fd, holder = _try_to_lock(folder, run_dir)
        if holder is not None:
            fix = "Wait for it, or use another checkpoint.dir"
            raise UserError(Problem("checkpoint-dir-busy", holder, path=str(folder), fix=fix))
        return cls(fd)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.fd)


def _try_to_lock(folder: Path, run_dir: Path | None = None) -> tuple[int, str | None]:
    """The descriptor of the locked file; or -1 and the reason, which names the holder of the lock.

    A holder writes its process and host into the file. In a folder of checkpoints it also writes its run
    folder: the ranks of a dead process may still train.
    """
    # A link would let the folder's maker choose a file elsewhere to be overwritten.
    fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(fd, MAX_BYTES).decode(errors="replace").partition("\n")[0] or "unknown"
        os.close(fd)
        return -1, f"is in use by another meshwright (process {holder})"
    content = os.read(fd, MAX_BYTES)
    before = _HOLDER.fullmatch(content)
    if content and not before:
        os.close(fd)
        raise FileExistsError(errno.EEXIST, "is a file of another program", str(folder / LOCK_FILE))
    mine = "" if run_dir is None else f"{run_dir.resolve()}\n"
    theirs = Path(os.fsdecode(before[1])) if before and before[1] else None
    if theirs is not None and mine != f"{theirs}\n" and _has_ranks(theirs):
        os.close(fd)
        return -1, f"is in use by the ranks of {theirs}, which train without their command"
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()} on {socket.gethostname()}\n{mine}".encode(errors="surrogateescape"), 0)
    return fd, None


def _has_ranks(run_dir: Path) -> bool:
    """Whether the agent of a run is there, on this host."""
    file = AgentFile.read(run_dir)
    connection = None if file is None else file.connect()
    if connection is None:
        return False
    connection.close()
    return True


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
