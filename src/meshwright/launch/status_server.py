"""A small HTTP server for status pages: read-only, one thread, a bearer token, strict limits.

It answers ``GET`` of a few fixed paths and closes the connection. It holds no request longer than a few
seconds and no more than a few kilobytes of it, so a client can neither fill memory nor keep the others from
being answered for long. The standard library's server blocks on a client that sends slowly.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from meshwright.core.events import warn
from meshwright.launch.acceptor import Acceptor
from meshwright.launch.network import Address

MOST_REQUEST_BYTES = 8192
MOST_CONNECTIONS = 32
"""Others are closed at once."""
CONNECTION_S = 5.0
"""A client has this long to send its request and to take the reply."""
JSON, TEXT = "application/json", "text/plain; charset=utf-8"


@dataclass(frozen=True)
class Reply:
    """The answer to a request."""

    status: HTTPStatus
    body: str
    content_type: str = TEXT
    headers: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Status line, headers and body."""
        content = self.body.encode()
        headers = {
            "Content-Type": self.content_type,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Connection": "close",
            **self.headers,
        }
        lines = [
            f"HTTP/1.1 {self.status.value} {self.status.phrase}",
            *(f"{k}: {v}" for k, v in headers.items()),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + content


Page = Callable[[], Reply]


@dataclass
class _Connection:
    socket: socket.socket
    deadline: float
    request: bytearray = field(default_factory=bytearray)
    reply: bytes = b""


class StatusServer:
    """Serves pages until it is closed."""

    def __init__(self, address: Address, token: bytes, pages: Mapping[str, Page]) -> None:
        """Listen, and answer in a thread.

        Args:
            address: Host and port; port 0 for any.
            token: That requests must have.
            pages: By path. They are called in the thread of this server.

        Raises:
            OSError: The address is not of this machine, or in use.
        """
        self._listener = address.listen(MOST_CONNECTIONS)
        self._wake, self._woken = socket.socketpair()
        self.address = Address(address.host, self._listener.getsockname()[1])
        self._token, self._pages = token, dict(pages)
        self._connections: dict[int, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(self._listener, self._selector)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="status-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end the thread."""
        self._closed = True
        self._wake.send(b"\0")
        self._thread.join()
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._selector.close()
        for one in (self._listener, self._wake, self._woken):
            one.close()

    def _run(self) -> None:
        while not self._closed:
            deadlines = [connection.deadline for connection in self._connections.values()]
            deadlines += [] if self._acceptor.resume_at is None else [self._acceptor.resume_at]
            timeout_s = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
            for key, _ in self._selector.select(timeout_s):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is not self._woken and key.fd in self._connections:
                    self._serve(self._connections[key.fd])
            now = time.monotonic()
            for connection in [c for c in self._connections.values() if c.deadline <= now]:
                self._drop(connection)
            self._acceptor.poll()

    def _accept(self) -> None:
        accepted = self._acceptor.accept()
        if accepted is None:
            return
        if len(self._connections) >= MOST_CONNECTIONS:
            accepted.close()
            return
        accepted.setblocking(False)
        connection = _Connection(accepted, time.monotonic() + CONNECTION_S)
        self._connections[accepted.fileno()] = connection
        self._selector.register(accepted, selectors.EVENT_READ)

    def _drop(self, connection: _Connection) -> None:
        del self._connections[connection.socket.fileno()]
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _serve(self, connection: _Connection) -> None:
        """Read a part of the request, or send a part of the reply."""
        try:
            if connection.reply:
                connection.reply = connection.reply[connection.socket.send(connection.reply) :]
                if not connection.reply:
                    self._finish(connection)
                return
            received = connection.socket.recv(MOST_REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)
            return
        connection.request += received
        if not received:
            self._drop(connection)
        elif len(connection.request) > MOST_REQUEST_BYTES:
            self._answer(connection, Reply(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "request too large\n"))
        elif b"\r\n\r\n" in connection.request:
            self._answer(connection, self._reply_to(bytes(connection.request)))

    def _finish(self, connection: _Connection) -> None:
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_WR)
        self._drop(connection)

    def _answer(self, connection: _Connection, reply: Reply) -> None:
        connection.reply = reply.encode()
        self._selector.modify(connection.socket, selectors.EVENT_WRITE)

    def _reply_to(self, request: bytes) -> Reply:
        head, _, body = request.partition(b"\r\n\r\n")
        try:
            first, *lines = head.decode("latin-1").split("\r\n")
            method, target, version = first.split(" ")
            pairs = [line.partition(":") for line in lines]
            headers = {name.lower(): value.strip() for name, _, value in pairs}
            valid = version in ("HTTP/1.0", "HTTP/1.1") and len(headers) == len(lines) and not body
            valid &= all(colon and name and name == name.strip() for name, colon, _ in pairs)
        except ValueError:
            valid = False
        if not valid or "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
            return Reply(HTTPStatus.BAD_REQUEST, "bad request\n")
        if not self._is_own_host(headers.get("host", "")) or "origin" in headers:
            return Reply(HTTPStatus.FORBIDDEN, "forbidden host or origin\n")
        if not self._is_authorized(headers.get("authorization", "")):
            wanted = {"WWW-Authenticate": "Bearer"}
            return Reply(HTTPStatus.UNAUTHORIZED, "a bearer token is needed\n", headers=wanted)
        if method != "GET":
            return Reply(HTTPStatus.METHOD_NOT_ALLOWED, "only GET\n", headers={"Allow": "GET"})
        page = self._pages.get(target)
        if page is None:
            return Reply(HTTPStatus.NOT_FOUND, f"pages are {', '.join(self._pages)}\n")
        try:
            return page()
        except Exception as error:
            warn(f"a status page failed: {error!r}")
            return Reply(HTTPStatus.INTERNAL_SERVER_ERROR, "the page failed\n")

    def _is_own_host(self, value: str) -> bool:
        """Whether a ``Host`` header is an address or a name of this machine: a foreign name is an attack."""
        host, colon, port = value.rpartition(":") if not value.endswith("]") else (value, "", "")
        if not colon:
            host = value
        elif port != str(self.address.port):
            return False
        host = host.removeprefix("[").removesuffix("]").lower()
        if host in {"localhost", self.address.host.lower(), socket.gethostname().lower()}:
            return bool(host)
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(host)
            return True
        return False

    def _is_authorized(self, value: str) -> bool:
        kind, _, token = value.partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(token.strip().encode("latin-1"), self._token)
