"""Aborts the pending collectives of a rank after another rank has failed; called from another thread.

NCCL communicators are aborted concurrently: an abort waits for the kernels of its communicator, and these may
be queued behind the kernels of another communicator. torch's ``_abort_process_group`` aborts one after the
other and did not return (torch 2.11, H200). gloo's ``abort`` does not end a wait for a stopped process (torch
2.13). So for gloo all TCP sockets that were opened since the groups were created are shut down. Every pending
wait then raises.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.parallel.shared_memory.transport import SharedMemoryTransport

NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Stops torch's NCCL watchdog from ending the process of a survivor. Also stops it from sleeping for a minute
after an error: during that time the process group cannot be destroyed. The agent watches the ranks
instead."""
OWN_FDS = Path("/proc/self/fd")


class GroupAborter:
    """Aborts the collectives of the process groups that are created after this object."""

    def __init__(self) -> None:
        self._before = _list_sockets()
        self._transport: SharedMemoryTransport | None = None
        self._aborted = False

    def add(self, transport: SharedMemoryTransport | None) -> None:
        """Also abort the collectives of a transport."""
        self._transport = transport
        if self._aborted and transport is not None:
            transport.abort()

    def abort(self) -> None:
        """Make all collectives in progress raise."""
        self._aborted = True
        if self._transport is not None:
            self._transport.abort()
        if not dist.is_initialized():
            return
        if dist.get_backend() == "nccl":
            _abort_nccl_groups()
            return
        for fd in _list_sockets() - self._before:
            _shut_down(fd)


def keep_process_after_nccl_errors() -> None:
    """Let this process survive NCCL errors of other ranks. Call it before process groups are created."""
    for name, value in NCCL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def drop_groups() -> None:
    """Destroy all process groups after a failure of any rank; no other rank needs to take part."""
    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl":
        _abort_nccl_groups()
        dist.distributed_c10d._abort_process_group()  # they are aborted: this clears torch's tables
    else:
        dist.destroy_process_group()


def _abort_nccl_groups() -> None:
    device = torch.device("cuda")
    groups = list(dist.distributed_c10d._world.pg_map)
    threads = [threading.Thread(target=group._get_backend(device).abort) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


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
