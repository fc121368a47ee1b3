"""Several machines on one: network namespaces that are connected by a bridge, with their own host names.

Packets are dropped by neighbour entries with an address that no machine has: the sender gets no error, and
the other direction still works. No packet filter is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from meshwright.runs.faults.checks.check import CannotRunError, require
from meshwright.runs.faults.checks.running_command import PROGRAM, Command
from meshwright.runs.faults.checks.slow_switch import SlowSwitch

PORT = 29500
WITH_HOST_NAME = 'hostname "$1" && shift && exec "$@"'
NOBODY = "02:00:00:00:00:fe"
"""A hardware address that no machine has."""
POLL_S = 0.05


def require_namespaces() -> None:
    """Find out whether this machine can make network namespaces.

    Raises:
        CannotRunError: It cannot.
    """
    if os.geteuid() != 0:
        raise CannotRunError("network namespaces need root")
    missing = [tool for tool in ("ip", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        raise CannotRunError(f"{missing[0]} is not installed")
    name = f"mw{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode:
        raise CannotRunError(f"ip netns add: {made.stderr.decode().strip()}")
    subprocess.run(["ip", "netns", "del", name], check=False)


def ip(*arguments: str) -> None:
    """Configure the network."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Nodes:
    """Namespaces ``node 0`` to ``node count - 1`` with the addresses 10.77.0.1, 10.77.0.2 and so on."""

    def __init__(self, count: int, folder: Path) -> None:
        self.folder, self._prefix = folder, f"mw{os.getpid()}-"
        self.names = [f"{self._prefix}{node}" for node in range(count)]
        self._switch = f"{self._prefix}sw"
        self.commands: list[Command] = []
        self.slow_switch: SlowSwitch | None = None

    def create(self, slow: bool = False) -> None:
        """Make the namespaces, and connect them.

        Args:
            slow: By a switch in user space that can delay frames, instead of a bridge.
        """
        for name in (self._switch, *self.names):
            ip("netns", "add", name)
        if slow:
            self.slow_switch = SlowSwitch.start(self.names)
        else:
            ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", self._switch, "link", "set", "bridge", "up")
            for node, name in enumerate(self.names):
                peer = ("type", "veth", "peer", "name", f"port{node}", "netns", self._switch)
                ip("-n", name, "link", "add", "net0", *peer)
                ip("-n", self._switch, "link", "set", f"port{node}", "master", "bridge", "up")
        for node, name in enumerate(self.names):
            ip("-n", name, "address", "add", f"{self.address(node)}/24", "dev", "net0")
            ip("-n", name, "link", "set", "net0", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def remove(self) -> None:
        """End all processes of the namespaces, and remove them."""
        for command in self.commands:
            command.close()
        for name in self.names:
            for pid in self.pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
        if self.slow_switch is not None:
            self.slow_switch.close()
        for name in (*self.names, self._switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def address(self, node: int) -> str:
        """Address of a node."""
        return f"10.77.0.{node + 1}"

    def pids(self, name: str) -> list[int]:
        """The processes of a namespace."""
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        return [int(pid) for pid in listed.stdout.split()]

    def set_cable(self, node: int, connected: bool) -> None:
        """Connect a node with the bridge, or disconnect it."""
        ip("-n", self._switch, "link", "set", f"port{node}", "up" if connected else "down")

    def lose(self, senders: Iterable[int], receivers: Collection[int]) -> None:
        """Let all packets from some nodes to others be lost."""
        for sender in senders:
            for receiver in (node for node in receivers if node != sender):
                entry = (self.address(receiver), "lladdr", NOBODY, "dev", "net0", "nud", "permanent")
                ip("-n", self.names[sender], "neigh", "replace", *entry)

    def separate(self, some: Collection[int], others: Collection[int]) -> None:
        """Let all packets between two groups of nodes be lost, in both directions."""
        self.lose(some, others)
        self.lose(others, some)

    def heal(self) -> None:
        """Lose nothing from now on."""
        for name in self.names:
            ip("-n", name, "neigh", "flush", "nud", "permanent")

    def run_python(self, node: int, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python code on a node."""
        command = ["ip", "netns", "exec", self.names[node], sys.executable, "-c", code, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    def start(self, node: int, *arguments: Any, hidden: Path | None = None) -> Command:
        """Start ``meshwright`` on a node, in a working folder of its own.

        Args:
            node: Node of the namespaces.
            arguments: Arguments of the command.
            hidden: A folder that the node does not see.
        """
        where = self.folder / f"node-{node}"
        where.mkdir(exist_ok=True)
        hide = f'mount -t tmpfs none "{hidden}" && ' if hidden else ""
        prefix = ["ip", "netns", "exec", self.names[node], "unshare", "--uts", "--mount", "sh", "-c"]
        prefix += [hide + WITH_HOST_NAME, "sh", f"host-{node}"]
        command = Command([*map(str, arguments)], where, [*prefix, *PROGRAM])
        self.commands.append(command)
        return command

    def train(self, job: Path, *overrides: str, options: tuple[str, ...] = ()) -> Command:
        """Start the supervisor on node 0."""
        where = (f"cluster.nodes={len(self.names)}", f"run_dir={self.run_dir}")
        join = ("--listen", f"{self.address(0)}:{PORT}", "--token-file", self.token)
        return self.start(0, "train", job, *where, *overrides, *join, "--json", *options)

    @property
    def run_dir(self) -> Path:
        """Run folder of the supervisor."""
        return self.folder / "run"

    @property
    def token(self) -> Path:
        """The token file."""
        return self.folder / "token"

    def join(self, node: int, *options: str, hidden: Path | None = None, via: int = 0) -> Command:
        """Start the agent of a node, when the supervisor has written the token.

        Args:
            node: Node of the namespaces.
            options: Options of the command.
            hidden: A folder that the node does not see.
            via: The node whose address it dials; the supervisor's, or that of a proxy.
        """
        wait_until(self.token.exists)
        join = ("--join", f"{self.address(via)}:{PORT}", "--token-file", self.token)
        return self.start(node, "agent", *join, *options, hidden=hidden)

    def events(self) -> list[dict[str, Any]]:
        """Events of the run so far."""
        return self.commands[0].events(self.run_dir)

    def require_no_error(self) -> None:
        """The newest command that trains runs, has ended without an error, or was killed."""
        newest = [command for command in self.commands if command.arguments[0] == "train"][-1]
        if (status := newest.process.poll() or 0) > 0:
            require(False, f"the command ended with status {status}: {newest.finish()[2]}")

    def rank_pid(self, rank: int) -> int:
        """The newest process of a rank."""
        return int([e["pid"] for e in self.events() if e["event"] == "started" and e["rank"] == rank][-1])

    def require_empty(self, limit_s: float = 15) -> None:
        """No process is left on any node."""
        wait_until(lambda: not any(self.pids(name) for name in self.names), limit_s)

    def listeners(self, node: int) -> set[int]:
        """Processes of a node that listen on a TCP port."""
        pids = self.pids(self.names[node])
        rows = [line.split() for line in Path(f"/proc/{pids[0]}/net/tcp").read_text().splitlines()[1:]]
        sockets = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
        return {pid for pid in pids if any(str(fd.readlink()) in sockets for fd in _list_fds(pid))}

    def listening(self, node: int) -> set[str]:
        """Addresses on which processes of a node listen."""
        shown = subprocess.run(
            ["ip", "netns", "exec", self.names[node], "cat", "/proc/net/tcp"],
            capture_output=True,
            text=True,
            check=True,
        )
        rows = [line.split() for line in shown.stdout.splitlines()[1:]]
        return {_decode_address(row[1]) for row in rows if row[3] == "0A"}


def _list_fds(pid: int) -> list[Path]:
    """The open files of a process, without those that it closes meanwhile."""
    return [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]


def _decode_address(text: str) -> str:
    """``0100007F:1F90`` of ``/proc/net/tcp`` as ``127.0.0.1:8080``."""
    host, _, port = text.partition(":")
    return f"{'.'.join(str(byte) for byte in reversed(bytes.fromhex(host)))}:{int(port, 16)}"


def wait_until(holds: Callable[[], object], limit_s: float = 60, what: str = "not") -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + limit_s
    while not holds():
        require(time.monotonic() < deadline, f"{what} within {limit_s:g} s")
        time.sleep(POLL_S)


def result_of(command: Command) -> dict[str, Any]:
    """The result of a run that succeeds."""
    status, out, err = command.finish(180)
    require(status == 0, f"status {status}: {err}")
    result: dict[str, Any] = json.loads(out)
    return result
