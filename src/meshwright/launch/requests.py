"""Requests of a rank to the supervisor, and the replies to them: for the rendezvous store across nodes.

A thread of the rank reads the replies. A generation that is ended fails the requests that wait in it, so that
no rank waits for one that is gone.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from itertools import count
from typing import Any

from meshwright.launch.channel import Channel, Message


class Requests:
    """The requests of one process that have no reply yet."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, queue.SimpleQueue[Message]] = {}
        self._ended = -1

    def ask(self, generation: int, request: Mapping[str, Any], timeout_s: float) -> Message:
        """Send a request and wait for the reply.

        Raises:
            TimeoutError: There was none in time.
            ConnectionError: The generation was ended, or the supervisor refused the request.
        """
        with self._lock:
            number, reply = next(self._numbers), queue.SimpleQueue[Message]()
            if generation <= self._ended:
                raise ConnectionError("the generation has ended")
            self._waiting[number] = reply
        try:
            self._channel.send({"is": "request", "id": number, "generation": generation, **request})
            answer = reply.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        except OSError as error:
            raise ConnectionError(str(error)) from None
        finally:
            with self._lock:
                del self._waiting[number]
        if "error" in answer:
            raise ConnectionError(answer["error"])
        return answer

    def answer(self, reply: Message) -> None:
        """Pass a reply to the thread that waits for it."""
        with self._lock:
            if (waiting := self._waiting.get(reply["id"])) is not None:
                waiting.put(reply)

    def end(self, generation: int) -> None:
        """Fail all requests of a generation, and further ones."""
        with self._lock:
            self._ended = max(self._ended, generation)
            for waiting in self._waiting.values():
                waiting.put({"error": "the generation has ended"})
