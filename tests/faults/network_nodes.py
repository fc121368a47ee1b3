"""Several machines on one: network namespaces that are connected by a bridge, with their own host names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from running_command import PROGRAM, Command

PORT = 29500
WITH_HOST_NAME = 'hostname "$1" && shift && exec "$@"'


def find_obstacle() -> str | None:
    """Why this machine cannot make network namespaces; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"{missing[0]} is not installed"
    name = f"mw{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], check=False)
    return None if made.returncode == 0 else f"ip netns add: {made.stderr.decode().strip()}"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Nodes:
    """Namespaces ``node 0`` to ``node count - 1`` with the addresses 10.77.0.1, 10.77.0.2 and so on."""

    def __init__(self, count: int, folder: Path) -> None:
        self.folder, self._prefix = folder, f"mw{os.getpid()}-"
        self.names = [f"{self._prefix}{node}" for node in range(count)]
        self._switch = f"{self._prefix}sw"
        self.commands: list[Command] = []

    def create(self) -> None:
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._switch, "link", "set", "bridge", "up")
        for node, name in enumerate(self.names):
            ip("netns", "add", name)
            ip(
                "-n",
                name,
                "link",
                "add",
                "net0",
                "type",
                "veth",
                "peer",
                "name",
                f"port{node}",
                "netns",
                self._switch,
            )
            ip("-n", self._switch, "link", "set", f"port{node}", "master", "bridge", "up")
            ip("-n", name, "address", "add", f"{self.address(node)}/24", "dev", "net0")
            ip("-n", name, "link", "set", "net0", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def remove(self) -> None:
        for command in self.commands:
            if command.process.poll() is None:
                command.process.kill()
            command.process.communicate()
        for name in self.names:
            for pid in self.pids(name):
                os.kill(pid, 9)
        for name in (*self.names, self._switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def pids(self, name: str) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        return [int(pid) for pid in listed.stdout.split()]

    def set_cable(self, node: int, connected: bool) -> None:
        """Connect a node with the bridge, or disconnect it."""
        ip("-n", self._switch, "link", "set", f"port{node}", "up" if connected else "down")

    def run_python(self, node: int, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python code on a node."""
        command = ["ip", "netns", "exec", self.names[node], sys.executable, "-c", code, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    def start(self, node: int, *arguments: Any, hidden: Path | None = None) -> Command:
        """Start ``meshwright`` on a node, in a working folder of its own.

        Args:
            node: Of the namespaces.
            arguments: Of the command.
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
        return self.folder / "run"

    @property
    def token(self) -> Path:
        return self.folder / "token"

    def join(self, node: int, *options: str, hidden: Path | None = None) -> Command:
        """Start the agent of a node, when the supervisor has written the token."""
        wait_until(self.token.exists)
        join = ("--join", f"{self.address(0)}:{PORT}", "--token-file", self.token)
        return self.start(node, "agent", *join, *options, hidden=hidden)

    def events(self) -> list[dict[str, Any]]:
        return self.commands[0].events(self.run_dir)

    def rank_pid(self, rank: int) -> int:
        return [e["pid"] for e in self.events() if e["event"] == "started" and e["rank"] == rank][-1]

    def require_empty(self, limit_s: float = 15) -> None:
        """No process is left on any node."""
        wait_until(lambda: not any(self.pids(name) for name in self.names), limit_s)

    def listeners(self, node: int) -> set[int]:
        """Processes of a node that listen on a TCP port."""
        pids = self.pids(self.names[node])
        rows = [line.split() for line in Path(f"/proc/{pids[0]}/net/tcp").read_text().splitlines()[1:]]
        sockets = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
        return {pid for pid in pids if any(str(fd.readlink()) in sockets for fd in list_fds(pid))}

    def listening(self, node: int) -> set[str]:
        """Addresses on which processes of a node listen."""
        shown = subprocess.run(
            ["ip", "netns", "exec", self.names[node], "cat", "/proc/net/tcp"],
            capture_output=True,
            text=True,
            check=True,
        )
        rows = [line.split() for line in shown.stdout.splitlines()[1:]]
        return {decode_address(row[1]) for row in rows if row[3] == "0A"}


def list_fds(pid: int) -> list[Path]:
    """The open files of a process, without those that it closes meanwhile."""
    return [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]


def decode_address(text: str) -> str:
    """``0100007F:1F90`` of ``/proc/net/tcp`` as ``127.0.0.1:8080``."""
    host, _, port = text.partition(":")
    return f"{'.'.join(str(byte) for byte in reversed(bytes.fromhex(host)))}:{int(port, 16)}"


def wait_until(holds: Any, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.05)  # polls other processes


def result_of(command: Command) -> dict[str, Any]:
    status, out, err = command.finish(180)
    assert status == 0, err
    return json.loads(out)
