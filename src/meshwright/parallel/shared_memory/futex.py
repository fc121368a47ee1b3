"""Futexes: a thread waits, without CPU time, until another process changes a word of shared memory.

Python has no binding, so the system call is made by ``ctypes``, which releases the GIL. The order in which
other processes see ordinary stores is that of x86: a counter that is written after the data is seen after it.
Other architectures need barriers that Python does not have.
"""

from __future__ import annotations

import ctypes
import platform
import sys

SYS_FUTEX = 202
"""On x86-64."""
FUTEX_WAIT, FUTEX_WAKE = 0, 1
ALL = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_supported() -> bool:
    """Whether this machine has futexes, and shows stores in their order."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and sys.maxsize > 2**32


_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long


def wake(address: ctypes.c_void_p) -> None:
    """Wake all threads that wait for a change of a word."""
    _syscall(SYS_FUTEX, address, FUTEX_WAKE, ALL, None, None, 0)


class Timeout:
    """How long a wait lasts at most."""

    def __init__(self, seconds: float) -> None:
        self._timespec = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        self._reference = ctypes.byref(self._timespec)

    def wait(self, address: ctypes.c_void_p, value: int) -> None:
        """Wait while a word has a value, until it is woken, a signal arrives or the time is over."""
        _syscall(SYS_FUTEX, address, FUTEX_WAIT, value, self._reference, None, 0)
