"""Messages between supervisor, agent and ranks: JSON objects with a length in front, on a stream socket.

Nothing that arrives is executed. A message has at most ``MAX_BYTES``.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from typing import Any

from meshwright.core.events import to_json

Message = dict[str, Any]

MAX_BYTES = 64 * 2**20
_LENGTH = struct.Struct("!I")


class Channel:
    """One end of a connection. Reading never blocks on half a message."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = bytearray()
        self._to_send = bytearray()
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """For ``selectors``."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message and wait until the socket has taken it.

        Raises:
            OSError: The other end is gone.
        """
        content = to_json(message).encode()
        with self._lock:
            self._socket.sendall(_LENGTH.pack(len(content)) + content)

    def queue(self, message: Message) -> None:
        """Send as much as the socket takes now; ``flush`` sends the rest. For a non-blocking socket."""
        content = to_json(message).encode()
        self._to_send += _LENGTH.pack(len(content)) + content
        self.flush()

    @property
    def has_output(self) -> bool:
        """Whether ``flush`` has something left to send."""
        return bool(self._to_send)

    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it.

        Raises:
            OSError: The other end is gone.
        """
        while self._to_send:
            try:
                sent = self._socket.send(self._to_send)
            except BlockingIOError:
                return
            del self._to_send[:sent]

    def receive(self) -> list[Message]:
        """The messages that have arrived. Waits for the first bytes, unless the socket is non-blocking.

        Raises:
            EOFError: The other end is gone, or sent something else.
        """
        try:
            content = self._socket.recv(2**18)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError(str(error)) from None
        if not content:
            raise EOFError("closed")
        self._received += content
        messages = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > MAX_BYTES:
                raise EOFError(f"a message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            messages.append(_parse(self._received[_LENGTH.size : end]))
            del self._received[:end]
        return messages

    def setblocking(self, blocking: bool) -> None:
        """Whether ``receive`` waits for the first bytes."""
        self._socket.setblocking(blocking)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def _parse(content: bytes | bytearray) -> Message:
    try:
        message = json.loads(content)
    except ValueError as error:
        raise EOFError(f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise EOFError("not an object")
    return message


def connected_pair() -> tuple[Channel, socket.socket]:
    """A channel, and the socket of its other end."""
    here, there = socket.socketpair()
    return Channel(here), there
