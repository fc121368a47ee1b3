"""A network switch in user space that delays frames: one TAP device per network namespace.

``python -m meshwright.runs.faults.checks.slow_switch NAMESPACE...`` makes the devices and forwards frames.
Each line of its standard input is a JSON list that changes the delay. It replaces the kernel's ``netem``,
which may be missing.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from meshwright.runs.faults.checks.check import CannotRunError

TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
SIOCSIFHWADDR, ARPHRD_ETHER = 0x8924, 1
CLONE_NEWNET = 0x40000000
FRAME = 2**17
MTU = 65521
DEVICE = b"net0"


class SlowSwitch:
    """The switch, in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    def start(cls, namespaces: Sequence[str]) -> SlowSwitch:
        """Make the devices ``net0`` in namespaces.

        Raises:
            CannotRunError: The kernel has no TAP devices.
        """
        if not TUN.exists():
            raise CannotRunError(f"{TUN} is missing: no TAP devices")
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, *namespaces],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None, "a pipe"
        if process.stdout.readline().strip() != "ready":
            process.kill()
            process.communicate()
            raise CannotRunError("TAP devices cannot be made")
        return cls(process)

    def configure(self, delay_s: float, stalls: float = 0.0, stall_s: float = 0.0) -> None:
        """Change the delay from now on.

        Args:
            delay_s: Delay of each frame.
            stalls: Share of frames that wait for longer, with all later ones of the same direction.
            stall_s: How long.
        """
        assert self._process.stdin is not None, "a pipe"
        self._process.stdin.write(json.dumps([delay_s, stalls, stall_s]) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End it; the devices vanish."""
        self._process.kill()
        self._process.communicate()


class _Forwarder:
    """Holds frames until they are due."""

    def __init__(self, taps: Sequence[int]) -> None:
        self._taps = taps
        self._random = random.Random(0)  # noqa: S311  (stalls, no secret)
        self._delay_s = self._stalls = self._stall_s = 0.0
        self._queue: list[tuple[float, int, int, bytes]] = []
        self._due: dict[tuple[int, int], float] = {}
        self._count = 0

    def configure(self, line: str) -> None:
        self._delay_s, self._stalls, self._stall_s = json.loads(line)

    def take(self, port: int) -> None:
        """Read a frame; it goes to the port of its address, or to all others."""
        frame = os.read(self._taps[port], FRAME)
        known = frame[:5] == bytes([2, 0, 0, 0, 0]) and frame[5] < len(self._taps)
        now = time.monotonic()
        for target in [frame[5]] if known else [other for other in range(len(self._taps)) if other != port]:
            due = now + self._delay_s
            if self._random.random() < self._stalls:
                due += self._stall_s
            due = max(due, self._due.get((port, target), 0.0))  # frames keep their order
            self._due[port, target] = due
            self._count += 1
            heapq.heappush(self._queue, (due, self._count, target, frame))

    def send_due(self) -> float | None:
        """Send what is due; returns the time until the next frame is."""
        while self._queue:
            wait_s = self._queue[0][0] - time.monotonic()
            if wait_s > 0:
                return wait_s
            _, _, target, frame = heapq.heappop(self._queue)
            try:
                os.write(self._taps[target], frame)
            except OSError:  # the device is down
                continue
        return None


def _open_tap(namespace: str, number: int) -> int:
    """A TAP device in a namespace, with a hardware address that ends in its number."""
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(there, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    tap = os.open(TUN, os.O_RDWR)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", DEVICE, IFF_TAP | IFF_NO_PI))
    fcntl.ioctl(
        tap, SIOCSIFHWADDR, struct.pack("16sH6s16x", DEVICE, ARPHRD_ETHER, bytes([2, 0, 0, 0, 0, number]))
    )
    libc.setns(own, CLONE_NEWNET)
    os.close(there)
    os.close(own)
    subprocess.run(["ip", "-n", namespace, "link", "set", "net0", "mtu", str(MTU)], check=True)
    return tap


def _serve(namespaces: Sequence[str]) -> None:
    taps = [_open_tap(name, number) for number, name in enumerate(namespaces)]
    forwarder, selector = _Forwarder(taps), selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ, -1)
    for port, tap in enumerate(taps):
        selector.register(tap, selectors.EVENT_READ, port)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    wait_s = None
    while True:
        for key, _ in selector.select(wait_s):
            if key.data >= 0:
                forwarder.take(key.data)
            elif line := sys.stdin.readline():
                forwarder.configure(line)
            else:
                return
        wait_s = forwarder.send_due()


if __name__ == "__main__":
    _serve(sys.argv[1:])
