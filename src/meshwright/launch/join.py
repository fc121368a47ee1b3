"""How a node agent joins a run over TCP: both ends prove that they know the token, and neither sends it.

The supervisor sends a nonce. The agent answers with a nonce of its own and the HMAC of both. The supervisor
compares it in constant time and sends its own HMAC, so that an agent obeys no false supervisor. Every later
message is signed with keys of this connection (``Channel.seal``). A recorded handshake is of no use: the
nonce of the supervisor is new each time.

The supervisor's end never blocks. A connection that sends anything else, or nothing for ``HANDSHAKE_S``, is
closed.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Literal

from meshwright.core.errors import MeshwrightError, Problem, RunFailedError, UserError
from meshwright.launch.acceptor import Acceptor
from meshwright.launch.channel import Channel, Message
from meshwright.launch.network import Address, notice_silence

PROTOCOL = 1
HANDSHAKE_S = 5.0
HANDSHAKE_BYTES = 1024
"""Longest message before the token is proved."""
MOST_PENDING = 64
"""Connections that may be in the handshake at once; further ones are closed."""
MOST_ACCEPTED = 64
"""Connections taken in one call, so that a flood does not hold up the supervisor."""
RETRY_S = 0.5
NONCE_BYTES = 32

Role = Literal["agent", "supervisor"]


def _prove(token: bytes, purpose: str, nonces: tuple[str, str]) -> bytes:
    content = "\n".join((f"meshwright {PROTOCOL}", purpose, *nonces)).encode()
    return hmac.digest(token, content, hashlib.sha256)


def _seal(channel: Channel, role: Role, token: bytes, nonces: tuple[str, str]) -> None:
    keys = {to: _prove(token, f"messages to {to}", nonces) for to in ("agent", "supervisor")}
    other = "supervisor" if role == "agent" else "agent"
    channel.seal(send_key=keys[other], receive_key=keys[role])


def _is_proof(given: object, token: bytes, role: Role, nonces: tuple[str, str]) -> bool:
    expected = _prove(token, role, nonces).hex()
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, expected)


@dataclass
class _Pending:
    """A connection in the handshake."""

    channel: Channel
    deadline: float
    nonce: str = field(default_factory=lambda: secrets.token_hex(NONCE_BYTES))


class JoinListener:
    """The supervisor's end: accepts agents that know the token."""

    def __init__(self, address: Address, token: bytes) -> None:
        """Listen.

        Raises:
            UserError: The address is in use or not of this machine.
        """
        try:
            self._listener = address.listen(MOST_PENDING)
        except OSError as error:
            rule = f"cannot be listened on: {error.strerror or error}"
            fix = "Use an address of this machine and a free port"
            raise UserError(
                Problem("node-address", rule, "listen", str(address), fix, is_argument=True)
            ) from None
        self._token = token
        self.address = Address(address.host, self._listener.getsockname()[1])
        self.refused = 0
        """Connections that did not prove the token."""
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(self._listener, self._selector)
        self._pending: dict[int, _Pending] = {}

    def fileno(self) -> int:
        """For ``selectors``: readable when ``accept`` has something to do."""
        return self._selector.fileno()

    def accept(self) -> list[Channel]:
        """Go on with all handshakes, without blocking; returns the channels of agents that have joined."""
        joined = []
        self._acceptor.poll()
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._accept_connections()
            elif self._answer(key.data):
                joined.append(key.data.channel)
        now = time.monotonic()
        for pending in [one for one in self._pending.values() if one.deadline <= now]:
            self._refuse(pending)
        return joined

    def _accept_connections(self) -> None:
        for _ in range(MOST_ACCEPTED):
            connection = self._acceptor.accept()
            if connection is None:
                return
            if len(self._pending) >= MOST_PENDING:
                self.refused += 1
                connection.close()
                continue
            connection.setblocking(False)
            pending = _Pending(Channel(connection, HANDSHAKE_BYTES), time.monotonic() + HANDSHAKE_S)
            self._pending[connection.fileno()] = pending
            self._selector.register(connection, selectors.EVENT_READ, pending)
            with contextlib.suppress(OSError):
                pending.channel.queue({"meshwright": PROTOCOL, "nonce": pending.nonce})

    def _answer(self, pending: _Pending) -> bool:
        """Check the proof of an agent; returns whether it has joined."""
        try:
            messages = pending.channel.receive()
        except EOFError:
            self._refuse(pending)
            return False
        if not messages:
            return False
        nonces = (pending.nonce, str(messages[0].get("nonce")))
        if len(messages) > 1 or not _is_proof(messages[0].get("proof"), self._token, "agent", nonces):
            self._refuse(pending)
            return False
        self._forget(pending)
        try:
            pending.channel.queue({"proof": _prove(self._token, "supervisor", nonces).hex()})
        except OSError:
            pending.channel.close()
            return False
        notice_silence(pending.channel.socket)
        _seal(pending.channel, "supervisor", self._token, nonces)
        return True

    def _forget(self, pending: _Pending) -> None:
        del self._pending[pending.channel.fileno()]
        self._selector.unregister(pending.channel)

    def _refuse(self, pending: _Pending) -> None:
        self.refused += 1
        self._forget(pending)
        pending.channel.close()

    def close(self) -> None:
        """Stop listening; connections in the handshake are closed."""
        for pending in list(self._pending.values()):
            self._forget(pending)
            pending.channel.close()
        self._selector.close()
        self._listener.close()


def join(address: Address, token: bytes, wait_s: float) -> Channel:
    """The agent's end: connect to the supervisor and prove the token to each other.

    Args:
        address: Address of the supervisor.
        token: Token of the run.
        wait_s: How long to try again while no supervisor listens there.

    Raises:
        RunFailedError: No supervisor answered in time.
        UserError: The tokens differ.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return _shake_hands(address, token)
        except OSError as error:
            if time.monotonic() + RETRY_S > deadline:
                rule = f"no supervisor answered within {wait_s:.0f} s: {error}"
                fix = "Start meshwright train with --listen first, and check address and firewall"
                raise RunFailedError(Problem("node-no-supervisor", rule, str(address), fix=fix)) from None
        time.sleep(RETRY_S)


def _shake_hands(address: Address, token: bytes) -> Channel:
    """One attempt; ``OSError`` if there was no answer."""
    connection = address.connect(HANDSHAKE_S)
    channel = Channel(connection, HANDSHAKE_BYTES)
    try:
        greeting = _receive_one(channel)
        nonces = (str(greeting.get("nonce")), secrets.token_hex(NONCE_BYTES))
        channel.send({"nonce": nonces[1], "proof": _prove(token, "agent", nonces).hex()})
        answer = _receive_proof(channel, address)
        if not _is_proof(answer.get("proof"), token, "supervisor", nonces):
            raise _differ(address)
    except (OSError, MeshwrightError):
        channel.close()
        raise
    _seal(channel, "agent", token, nonces)
    notice_silence(connection)
    return channel


def _receive_one(channel: Channel) -> Message:
    try:
        while not (messages := channel.receive()):
            pass
    except EOFError as error:
        raise ConnectionError(str(error)) from None
    return messages[0]


def _receive_proof(channel: Channel, address: Address) -> Message:
    """The supervisor's proof. It closes the connection if the agent's was wrong."""
    try:
        return _receive_one(channel)
    except ConnectionError:
        raise _differ(address) from None


def _differ(address: Address) -> UserError:
    rule = "the supervisor there has another token"
    fix = "Copy the token file of the command that started the run"
    return UserError(Problem("node-token", rule, str(address), fix=fix))


def local_address(connection: socket.socket) -> str:
    """The IP address of this end of a connection."""
    return str(connection.getsockname()[0])
