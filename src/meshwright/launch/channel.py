"""Messages between supervisor, agent and ranks: JSON objects with a length in front, on a stream socket.

Nothing that arrives is executed. A message has at most ``MAX_BYTES``. Between machines every message carries
an HMAC of its content and its number, so that it cannot be changed, repeated or left out on the way.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import struct
import threading
from typing import Any

from meshwright.core.events import to_json

Message = dict[str, Any]

MAX_BYTES = 64 * 2**20
_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")


class _Seal:
    """The HMACs of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def sign_next(self, content: bytes) -> bytes:
        """The HMAC of the next message."""
        self._number += 1
        return hmac.digest(self._key, _NUMBER.pack(self._number) + content, hashlib.sha256)


class Channel:
    """One end of a connection. Reading never blocks on half a message."""

    def __init__(self, connection: socket.socket, max_bytes: int = MAX_BYTES) -> None:
        """Take over a connection.

        Args:
            connection: A stream socket.
            max_bytes: Size limit of a message that arrives; a longer one closes the connection.
        """
        self._socket, self._max_bytes = connection, max_bytes
        self._sent_seal: _Seal | None = None
        self._received_seal: _Seal | None = None
        self._received = bytearray()
        self._to_send = bytearray()
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """For ``selectors``."""
        return self._socket.fileno()

    def seal(self, send_key: bytes, receive_key: bytes) -> None:
        """From now on, sign messages that are sent and check those that are received."""
        self._sent_seal, self._received_seal = _Seal(send_key), _Seal(receive_key)
        self._max_bytes = MAX_BYTES

    @property
    def socket(self) -> socket.socket:
        """The connection."""
        return self._socket

    def send(self, message: Message) -> None:
        """Send a message and wait until the socket has taken it.

        Raises:
            OSError: The other end is gone.
        """
        with self._lock:
            self._socket.sendall(self._pack(message))

    def _pack(self, message: Message) -> bytes:
        content = to_json(message).encode()
        if self._sent_seal is not None:
            content = self._sent_seal.sign_next(content) + content
        return _LENGTH.pack(len(content)) + content

    def queue(self, message: Message) -> None:
        """Send as much as the socket takes now; ``flush`` sends the rest. For a non-blocking socket."""
        self._to_send += self._pack(message)
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
            if length > self._max_bytes:
                raise EOFError(f"a message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            content = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
            messages.append(_parse(self._open(content)))
        return messages

    def _open(self, content: bytes) -> bytes:
        """The content of a message, after its HMAC was checked."""
        if self._received_seal is None:
            return content
        signature, content = content[: hashlib.sha256().digest_size], content[hashlib.sha256().digest_size :]
        if not hmac.compare_digest(signature, self._received_seal.sign_next(content)):
            raise EOFError("a message with a wrong signature")
        return content

    def setblocking(self, blocking: bool) -> None:
        """Whether ``receive`` waits for the first bytes."""
        self._socket.setblocking(blocking)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def _parse(content: bytes) -> Message:
    try:
        message = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise EOFError(f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise EOFError("not an object")
    return message


def connected_pair() -> tuple[Channel, socket.socket]:
    """A channel, and the socket of its other end."""
    here, there = socket.socketpair()
    return Channel(here), there
