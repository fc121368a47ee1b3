"""Network addresses: ``HOST:PORT``, and the interface that has an address."""

from __future__ import annotations

import array
import contextlib
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.errors import Problem, UserError
from meshwright.launch.environment import loopback_interface

SIOCGIFCONF = 0x8912
_INTERFACE = struct.Struct("16s4x4s16x")
"""Name and IPv4 address of an entry of ``SIOCGIFCONF`` on 64-bit Linux."""
_MOST_ADDRESSES = 1024

ANSWER_TIMEOUT_S = 10
"""A connection whose other end does not acknowledge data for this long is lost."""


@dataclass(frozen=True)
class Address:
    """A host and a TCP port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, argument: str) -> Address:
        """Read ``HOST:PORT`` or ``[IPV6]:PORT``, of an argument or a key of the job.

        Raises:
            UserError: It is something else.
        """
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or int(port) > 65535:
            rule = "is not HOST:PORT"
            fix = "Write an address of this machine and a port, such as 10.0.0.1:29500"
            raise UserError(
                Problem("node-address", rule, argument, text, fix, is_argument="." not in argument)
            )
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def listen(self, backlog: int) -> socket.socket:
        """A socket that listens on this address and no other.

        Raises:
            OSError: The address is not of this machine, or in use.
        """
        family, kind, protocol, _, where = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[
            0
        ]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(backlog)
        except OSError:
            listener.close()
            raise
        listener.setblocking(False)
        return listener

    def connect(self, timeout_s: float) -> socket.socket:
        """A connection to this address.

        Raises:
            OSError: No process listens there.
        """
        return socket.create_connection((self.host, self.port), timeout=timeout_s)


@dataclass(frozen=True)
class ListenOptions:
    """Where the agents of other nodes join, as the user gives it."""

    address: str | None = None
    """``HOST:PORT``."""
    token_file: Path | None = None
    """Holds the token that agents must have."""

    def refuse(self, where: str, fix: str) -> None:
        """Refuse options that have no effect.

        Raises:
            UserError: One is given.
        """
        name = "listen" if self.address is not None else "token_file"
        value = self.address or self.token_file
        if value is not None:
            rule = f"has no effect {where}"
            raise UserError(Problem("node-address", rule, name, str(value), fix, is_argument=True))


def notice_silence(connection: socket.socket) -> None:
    """Let the kernel end a TCP connection whose other machine no longer answers, and send at once."""
    options = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 4}
    options["TCP_USER_TIMEOUT"] = ANSWER_TIMEOUT_S * 1000
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def find_interface(address: str) -> str | None:
    """The network interface that has an IP address; None if it is not found."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(wanted, ipaddress.IPv6Address) and wanted.ipv4_mapped is not None:
        wanted = wanted.ipv4_mapped
    if wanted.is_loopback:
        return loopback_interface()
    found = _list_ipv4() if isinstance(wanted, ipaddress.IPv4Address) else _list_ipv6()
    return found.get(wanted.packed)


def _list_ipv4() -> dict[bytes, str]:
    """Interfaces by IPv4 address. A further address of an interface has a label such as ``eth0:1``."""
    import fcntl  # noqa: PLC0415  (not on all systems)

    buffer = array.array("B", bytes(_INTERFACE.size * _MOST_ADDRESSES))
    request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        used, _ = struct.unpack("iL", fcntl.ioctl(any_socket.fileno(), SIOCGIFCONF, request))
    entries = [_INTERFACE.unpack_from(buffer, at) for at in range(0, used, _INTERFACE.size)]
    return {ip: name.rstrip(b"\0").decode().partition(":")[0] for name, ip in entries}


def _list_ipv6() -> dict[bytes, str]:
    found = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            fields = line.split()
            found[bytes.fromhex(fields[0])] = fields[-1]
    return found
