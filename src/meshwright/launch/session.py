"""Messages between supervisor and agent that outlive their connection.

Each end keeps what it has sent until the other end has it. If the connection breaks, the agent dials again
and both ends send what the other one has missed, in order. Nothing is lost or repeated, and no rank notices.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable

from meshwright.launch.channel import Message

RECONNECT_S = 3.0
"""How long the supervisor waits for an agent whose connection broke."""
MOST_KEPT = 100_000
"""Messages; an agent that has missed more is lost."""
UNCOUNTED = frozenset(
    (
        *("join", "spare_ready", "prepared", "adopted", "watch"),
        *("adopt", "prepare", "wait_as_spare", "refuse", "resume", "ack"),
    )
)
"""Messages of the handshake and of the session itself, and reports of which only the newest counts."""


class Session:
    """One end's messages, from the time when an agent joined."""

    def __init__(self, name: str = "") -> None:
        self.name = name or secrets.token_hex(8)
        self.received = 0
        """Messages of the other end."""
        self._sent = 0
        self._kept: deque[Message] = deque(maxlen=MOST_KEPT)
        """The last ones that were sent."""

    def keep(self, message: Message) -> None:
        """A message is sent, or would be."""
        if _counts(message):
            self._sent += 1
            self._kept.append(message)

    def count(self, messages: Iterable[Message]) -> None:
        """Messages have arrived."""
        self.received += sum(_counts(message) for message in messages)

    def acknowledge(self, received: int) -> None:
        """The other end has this many messages."""
        while self._kept and self._sent - len(self._kept) < received:
            self._kept.popleft()

    @property
    def unacknowledged(self) -> list[Message]:
        """Sent messages that the other end has not acknowledged."""
        return list(self._kept)

    def missed(self, received: int) -> list[Message] | None:
        """Messages that the other end has missed; None if they are no longer kept."""
        if not self._sent - len(self._kept) <= received <= self._sent:
            return None
        return list(self._kept)[len(self._kept) - (self._sent - received) :]


def _counts(message: Message) -> bool:
    return (message.get("do") or message.get("is")) not in UNCOUNTED
