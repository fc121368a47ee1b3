"""How long the TCP connections of this process to other hosts were busy sending: finds slow links.

In a collective all ranks wait equally long for a slow link, so waits do not show which link is slow. Linux
counts for each connection how long it had data to send (``tcpi_busy_time``), and for how much of that the
receiver did not read (``tcpi_rwnd_limited``). The difference is the time of the network. gloo and NCCL over
sockets use such connections; InfiniBand has none.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

MOST_CONNECTIONS = 128
"""Connections that are looked at: 6 µs each per step, 18 µs when new ones are searched."""
MOST_REPORTED = 16
"""Links of a step that are reported: those that sent most."""
INFO_BYTES = 192
"""Size of ``struct tcp_info``, up to ``tcpi_sndbuf_limited`` (Linux 4.10)."""
ACKED_AT, BUSY_AT, UNREAD_AT = 120, 168, 176
"""Offsets of ``tcpi_bytes_acked``, ``tcpi_busy_time`` and ``tcpi_rwnd_limited`` (times in µs)."""

LinkTimes = dict[str, list[float]]
"""By ``LOCAL>PEER``, two addresses: seconds of the busiest connection, and bytes of all of them."""


@dataclass
class _Connection:
    """A connection to another host."""

    fd: int
    inode: int
    link: str
    busy_us: int
    acked: int


class LinkMeter:
    """The connections of this process to other hosts."""

    def __init__(self) -> None:
        self._connections: dict[int, _Connection] = {}
        """By inode."""
        self._reports = 0

    def take(self) -> LinkTimes:
        """How long each link was busy since the last call; nothing on systems that do not count it."""
        if sys.platform != "linux":
            return {}
        found: LinkTimes = {}
        for known in list(self._connections.values()):
            now = _look(known.fd)
            if now is None or now.inode != known.inode:  # closed
                del self._connections[known.inode]
                continue
            one = found.setdefault(known.link, [0.0, 0.0])
            one[0] = max(one[0], (now.busy_us - known.busy_us) / 1e6)
            one[1] += now.acked - known.acked
            self._connections[known.inode] = now
        if self._reports & (self._reports - 1) == 0:  # 0, 1, 2, 4, 8: most are made in the first steps
            self._scan()
        self._reports += 1
        most = sorted(found, key=lambda link: -found[link][1])[:MOST_REPORTED]
        return {link: [round(found[link][0], 6), found[link][1]] for link in most if found[link][1] > 0}

    def _scan(self) -> None:
        """Find new connections. They count from now on."""
        with contextlib.suppress(OSError):
            for path in Path("/proc/self/fd").iterdir():
                if len(self._connections) >= MOST_CONNECTIONS:
                    return
                with contextlib.suppress(OSError):
                    is_socket = path.readlink().name.startswith("socket:")
                    if is_socket and (found := _look(int(path.name))) is not None:
                        self._connections.setdefault(found.inode, found)


def _look(fd: int) -> _Connection | None:
    """The connection of a descriptor; None if it is something else."""
    try:
        inode = os.fstat(fd).st_ino
        borrowed = socket.socket(fileno=fd)
    except (OSError, ValueError):
        return None
    try:
        if borrowed.family not in (socket.AF_INET, socket.AF_INET6) or borrowed.type != socket.SOCK_STREAM:
            return None
        local, peer = borrowed.getsockname()[0], borrowed.getpeername()[0]
        info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    except OSError:
        return None
    finally:
        borrowed.detach()  # its owner closes it
    if local == peer or len(info) < INFO_BYTES:
        return None
    acked, busy_us, unread_us = (
        struct.unpack_from("=Q", info, at)[0] for at in (ACKED_AT, BUSY_AT, UNREAD_AT)
    )
    return _Connection(fd, inode, f"{local}>{peer}", max(0, busy_us - unread_us), acked)
