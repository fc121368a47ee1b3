"""Accepts connections, and pauses when the process cannot accept one, such as without free file descriptors.

A listener stays readable until its connections are accepted. Without the pause, a selector loop would spin on
a connection that it cannot accept.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from typing import Any

PAUSE_S = 0.5
"""Connections wait this long in the listener's queue until the next attempt."""
_NO_CONNECTION = (errno.EAGAIN, errno.EINTR, errno.ECONNABORTED)


class Acceptor:
    """A listening socket in a selector; it is unregistered while accepting is paused."""

    def __init__(self, listener: socket.socket, selector: selectors.BaseSelector, data: Any = None) -> None:
        """Register the listener, which must not block, with data for the selector."""
        self._listener, self._selector, self._data = listener, selector, data
        self._selector.register(listener, selectors.EVENT_READ, data)
        self.resume_at: float | None = None
        """End of the pause; None if there is none."""

    def accept(self) -> socket.socket | None:
        """The next connection; None if there is none, or if it cannot be accepted: then a pause begins."""
        try:
            return self._listener.accept()[0]
        except OSError as error:
            if error.errno not in _NO_CONNECTION and self.resume_at is None:
                self._selector.unregister(self._listener)
                self.resume_at = time.monotonic() + PAUSE_S
            return None

    def poll(self) -> None:
        """End the pause if it is over. To be called at ``resume_at`` or later."""
        if self.resume_at is not None and self.resume_at <= time.monotonic():
            self._selector.register(self._listener, selectors.EVENT_READ, self._data)
            self.resume_at = None
