"""Processes of a run in ``/proc``: listening ports, open files and memory."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LISTENING = "0A"
"""State of a socket in ``/proc/net/tcp``."""


@dataclass(frozen=True)
class Port:
    """A listening TCP port."""

    address: str
    port: int
    pid: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return ipaddress.ip_address(self.address).is_loopback


@dataclass(frozen=True)
class Resources:
    """Memory and open files of a process."""

    rss_bytes: int
    files: int
    """Open files and sockets."""

    @classmethod
    def read(cls, pid: int) -> Resources | None:
        """Resources of a process; None if it is gone."""
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            files = len(list(_list_links(pid)))
        except (FileNotFoundError, ProcessLookupError):
            return None
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), files)


def list_ports(pids: Iterable[int]) -> list[Port]:
    """The TCP ports on which processes listen."""
    owners = {link: pid for pid in pids for link in _list_links(pid) if link.startswith("socket:")}
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                owner = owners.get(f"socket:[{fields[9]}]")
                if fields[3] == LISTENING and owner is not None:
                    address, _, port = fields[1].partition(":")
                    found.append(Port(_read_address(address), int(port, 16), owner))
    return sorted(found, key=lambda port: port.port)


def _read_address(text: str) -> str:
    """An address of ``/proc/net/tcp``: words of 32 bits in the byte order of the machine."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def _list_links(pid: int) -> Iterable[str]:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield str(entry.readlink())
