"""Ends the collectives that a rank waits in, from another thread, after another rank has failed.

NCCL communicators are aborted. gloo's ``abort`` does not end a wait for a stopped process (torch 2.13). So
the TCP sockets that were opened since the groups were created are shut down; then the wait raises at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import torch.distributed as dist

OWN_FDS = Path("/proc/self/fd")


class GroupAborter:
    """Knows the sockets of the process groups that are created after it."""

    def __init__(self) -> None:
        self._before = _list_sockets()

    def abort(self) -> None:
        """Make all collectives in progress raise."""
        if not dist.is_initialized():
            return
        if dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()
            return
        for fd in _list_sockets() - self._before:
            _shut_down(fd)


def _list_sockets() -> set[tuple[int, str]]:
    """File descriptor and inode of every open socket."""
    found = set()
    for entry in OWN_FDS.iterdir() if OWN_FDS.exists() else ():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:"):
                found.add((int(entry.name), target))
    return found


def _shut_down(opened: tuple[int, str]) -> None:
    fd, inode = opened
    with contextlib.suppress(OSError):
        copy = os.dup(fd)
        with socket.socket(fileno=copy) as connection:
            same = str((OWN_FDS / str(copy)).readlink()) == inode
            # gloo ends the process when a socket that it listens on is shut down.
            listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if same and not listens and connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.shutdown(socket.SHUT_RDWR)
