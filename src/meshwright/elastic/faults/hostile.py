"""Hostile clients: connections to every listening port of a run, with bytes that no peer would send."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.elastic.faults.processes import Port, Resources, list_ports

CONNECT_TIMEOUT_S = 1.0
MOST_ATTEMPTS = 2
"""For each connection: a port may be busy with others."""
OPEN_AT_ONCE = 40
"""Connections that stay open while others are made."""
MB = 1e6


def _message(**content: object) -> bytes:
    """A message as agents and ranks exchange them (``launch.channel``), without the token."""
    text = json.dumps(content).encode()
    return struct.pack("!I", len(text)) + text


PAYLOADS: tuple[Callable[[random.Random], bytes], ...] = (
    lambda _: b"",
    lambda seed: seed.randbytes(seed.randint(1, 4096)),
    lambda _: b"\xff" * 64,  # a huge length
    lambda _: struct.pack("<Q", 2**60) + b"x" * 64,
    lambda _: _message(token="0" * 32),
    lambda _: _message(do="signal", rank=0, number=9),
    lambda _: _message(do="end"),
    lambda _: _message(action="exit", generation=0),
)


@dataclass(frozen=True)
class Attack:
    """Connections that were made, and their effect on the processes."""

    ports: tuple[Port, ...]
    connections: int
    before: Mapping[int, Resources]
    """By process."""

    def rss_growth_mb(self) -> float:
        """Growth of the process that grew most."""
        grown = [now.rss_bytes - was.rss_bytes for was, now in self._pairs(self.before)]
        return max(grown, default=0) / MB

    def file_growth(self, pids: Sequence[int]) -> int:
        """Files and sockets that some processes have open now and had not before; the most of one process."""
        pairs = self._pairs({pid: self.before[pid] for pid in pids if pid in self.before})
        return max((now.files - was.files for was, now in pairs), default=0)

    @staticmethod
    def _pairs(before: Mapping[int, Resources]) -> list[tuple[Resources, Resources]]:
        pairs = [(was, Resources.read(pid)) for pid, was in before.items()]
        return [(was, now) for was, now in pairs if now is not None]


def attack(pids: Sequence[int], unix_socket: str | None, connections: int, seed: int) -> Attack:
    """Connect to every port of some processes in turn, and to the Unix socket of the agent."""
    found = {pid: Resources.read(pid) for pid in pids}
    before = {pid: resources for pid, resources in found.items() if resources is not None}
    ports, generator = list_ports(pids), random.Random(seed)  # noqa: S311  (no secret)
    targets: list[tuple[socket.AddressFamily, object]] = [
        (socket.AF_INET6 if ":" in port.address else socket.AF_INET, (port.address, port.port))
        for port in ports
    ]
    if unix_socket is not None:
        targets.append((socket.AF_UNIX, unix_socket))
    held: list[socket.socket] = []
    made = 0
    for number in range(MOST_ATTEMPTS * connections if targets else 0):
        if made == connections:
            break
        family, address = targets[number % len(targets)]
        client = _connect(family, address, PAYLOADS[number // len(targets) % len(PAYLOADS)](generator))
        if client is not None:
            made += 1
            held.append(client)
        if len(held) > OPEN_AT_ONCE:
            held.pop(0).close()
    for client in held:
        client.close()
    return Attack(tuple(ports), made, before)


def _connect(family: socket.AddressFamily, address: object, payload: bytes) -> socket.socket | None:
    client = socket.socket(family, socket.SOCK_STREAM)
    client.settimeout(CONNECT_TIMEOUT_S)
    try:
        client.connect(address)  # type: ignore[arg-type]  # by family
    except OSError:
        client.close()
        return None
    with contextlib.suppress(OSError):  # refused while it is sent
        client.sendall(payload)
    if family is socket.AF_UNIX:  # the agent waits for the token of one connection at a time
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)
    return client
