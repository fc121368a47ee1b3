"""The fence of a rank's process: after another process has taken the rank, it commits nothing.

A process that was stopped may wake up at any instruction, also just before it writes. So every commit (an
event, a checkpoint, an in-memory snapshot) is made under a file lock, which the process tries to take without
waiting. The agent fences a process by taking the lock for good. If the process was stopped inside a commit,
the agent cannot take it, and kills the process instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import threading
from collections.abc import Iterator


class FencedError(Exception):
    """Another process has taken the rank of this one."""

    def __init__(self) -> None:
        super().__init__("another process has taken this rank")


class HaltedError(Exception):
    """The supervisor has ended the generation."""

    def __init__(self) -> None:
        super().__init__("the supervisor has ended this generation")


class Fence:
    """The agent's end of a fence: a lock file in memory."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("meshwright-fence", os.MFD_CLOEXEC)

    @property
    def path(self) -> str:
        """Where the process opens it. An inherited descriptor would share the agent's lock."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def shut(self) -> bool:
        """Let the process commit nothing from now on; returns False if it is inside a commit."""
        return _take(self._fd)

    def close(self) -> None:
        """Close this process's reference. A fence that is shut opens again: the process must have ended."""
        os.close(self._fd)


class CommitGuard:
    """The rank's end of its fence, and whether its generation has ended. Called around each commit."""

    def __init__(self) -> None:
        self._fd = -1
        self._mutex = threading.RLock()
        self._depth = 0
        self._generation: float = 0
        self._halted_generation = -1

    def open(self, path: str) -> None:
        """Obey another fence from now on."""
        with self._mutex:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def begin(self, generation: int) -> None:
        """Commit for a generation from now on."""
        self._generation = generation

    def leave(self) -> None:
        """This rank has left its generation, and reports why."""
        self._generation = math.inf

    def halt(self, generation: int) -> None:
        """Refuse commits of a generation.

        An aborted NCCL collective returns without an error, and with wrong values.
        """
        self._halted_generation = max(generation, self._halted_generation)

    def is_halted(self, generation: float) -> bool:
        """Whether commits of a generation are refused."""
        return self._halted_generation >= generation

    @property
    def is_shut(self) -> bool:
        """Whether another process has taken the rank."""
        with self._mutex:
            if self._depth or self._fd < 0:
                return False
            shut = not _take(self._fd)
            if not shut:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            return shut

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Commit inside. May be nested.

        Raises:
            FencedError: Another process has taken the rank.
            HaltedError: The supervisor has ended the generation.
        """
        with self._mutex:
            if not self._depth:
                self._enter()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth and self._fd >= 0:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _enter(self) -> None:
        if self._fd >= 0 and not _take(self._fd):
            raise FencedError
        if self.is_halted(self._generation):
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            raise HaltedError


def _take(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
