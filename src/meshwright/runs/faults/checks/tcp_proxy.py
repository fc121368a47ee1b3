"""A TCP proxy between agents and the supervisor, which can reset all connections in the middle of a stream.

``python -m meshwright.runs.faults.checks.tcp_proxy LISTEN PORT TARGET`` forwards. For each line of its
standard input it resets all connections and answers with their number.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence

CHUNK = 2**16
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of 0 s: closing sends RST instead of FIN."""


class TcpProxy:
    """The proxy, in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    def start(cls, prefix: Sequence[str], listen: str, port: int, target: str) -> TcpProxy:
        """Start it.

        Args:
            prefix: A command that runs another one, such as ``ip netns exec``.
            listen: Address to listen on.
            port: Port of both.
            target: Address to forward to.
        """
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", __name__, listen, str(port), target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None, "a pipe"
        process.stdout.readline()
        return cls(process)

    def reset(self) -> int:
        """Reset all connections; returns their number."""
        assert self._process.stdin is not None, "a pipe"
        assert self._process.stdout is not None, "a pipe"
        self._process.stdin.write("reset\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


class _Pairs:
    """Connections, each with the one that it is forwarded to."""

    def __init__(self, listener: socket.socket, target: tuple[str, int]) -> None:
        self._listener, self._target = listener, target
        self._other: dict[socket.socket, socket.socket] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ, self._accept)

    def _accept(self, _: socket.socket) -> None:
        client, _address = self._listener.accept()
        try:
            server = socket.create_connection(self._target, timeout=5)
        except OSError:
            client.close()
            return
        for one, other in ((client, server), (server, client)):
            one.settimeout(None)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._other[one] = other
            self.selector.register(one, selectors.EVENT_READ, self._forward)

    def _forward(self, one: socket.socket) -> None:
        if one not in self._other:  # closed with its other end
            return
        try:
            content = one.recv(CHUNK)
            if content:
                self._other[one].sendall(content)
                return
        except OSError:
            pass
        self._close(one)

    def _close(self, one: socket.socket) -> None:
        for end in (one, self._other[one]):
            self.selector.unregister(end)
            del self._other[end]
            end.close()

    def reset(self) -> int:
        count = len(self._other) // 2
        while self._other:
            one, other = next(iter(self._other.items()))
            for end in (one, other):
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self._close(one)
        return count


def _serve(listen: str, port: str, target: str) -> None:
    listener = socket.create_server((listen, int(port)))
    pairs = _Pairs(listener, (target, int(port)))
    pairs.selector.register(sys.stdin, selectors.EVENT_READ, None)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        for key, _ in pairs.selector.select():
            if key.data is not None:
                key.data(key.fileobj)
            elif sys.stdin.readline():
                sys.stdout.write(f"{pairs.reset()}\n")
                sys.stdout.flush()
            else:
                return


if __name__ == "__main__":
    _serve(*sys.argv[1:])
