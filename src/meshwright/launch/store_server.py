"""The rendezvous store of a run on several nodes: one key space per generation, held by the supervisor.

Ranks send requests through their agents (``launch.requests``). A request that waits for keys is answered when
they are set. Requests of another generation are refused, so a rank that was left behind cannot disturb the
others. Operations follow ``torch.distributed.Store``. Values are base64 in the messages.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

from meshwright.launch.channel import Message

MOST_KEY_BYTES = 1024
MOST_VALUE_BYTES = 2**20
MOST_BYTES = 256 * 2**20
"""Size limit of all keys and values of a generation."""


class RefusedError(Exception):
    """A request that cannot be answered."""


@dataclass(frozen=True)
class _Waiting:
    """A request that waits for keys."""

    rank: int
    request: Message


class StoreServer:
    """Answers the requests of all ranks."""

    def __init__(self) -> None:
        self._generation = -1
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._waiting: list[_Waiting] = []

    def begin(self, generation: int) -> None:
        """Forget all keys, and serve a generation."""
        self._generation, self._values, self._bytes, self._waiting = generation, {}, 0, []

    def handle(self, rank: int, request: Message) -> list[tuple[int, Message]]:
        """Handle a request; returns replies, each with the rank that it goes to."""
        reply = self._try(request)
        if reply is None:
            self._waiting.append(_Waiting(rank, request))
            return []
        replies, waiting = [(rank, reply)], []
        for one in self._waiting:
            late = self._try(one.request)
            if late is None:
                waiting.append(one)
            else:
                replies.append((one.rank, late))
        self._waiting = waiting
        return replies

    def forget(self, rank: int) -> None:
        """Drop the requests of a rank whose process has ended."""
        self._waiting = [one for one in self._waiting if one.rank != rank]

    def _try(self, request: Message) -> Message | None:
        """The reply to a request; None if it waits for keys."""
        identity = {"id": request.get("id"), "generation": self._generation}
        try:
            if request.get("generation") != self._generation:
                raise RefusedError(f"generation {request.get('generation')} is over")
            result = self._do(request)
        except (RefusedError, ValueError, KeyError, TypeError) as error:
            return {**identity, "error": str(error)}
        return None if result is None else {**identity, **result}

    def _do(self, request: Message) -> Message | None:
        op, keys = request["op"], [_checked_key(key) for key in request["keys"]]
        values = [_decode(value) for value in request.get("values", [])]
        if op in ("get", "wait"):
            if any(key not in self._values for key in keys):
                return None
            return {"values": [_encode(self._values[key]) for key in keys] if op == "get" else []}
        if op == "set":
            for key, value in zip(keys, values, strict=True):
                self._set(key, value)
            return {}
        if op == "check":
            return {"result": all(key in self._values for key in keys)}
        if op == "count":
            return {"result": len(self._values)}
        (key,) = keys
        return {"result": self._change(op, key, values, request)}

    def _change(self, op: str, key: str, values: list[bytes], request: Message) -> Any:
        """Operations that change one key by its old value."""
        before = self._values.get(key)
        if op == "add":
            total = int(before or b"0") + int(request["amount"])
            self._set(key, str(total).encode())
            return total
        if op == "append":
            self._set(key, (before or b"") + values[0])
            return None
        if op == "delete":
            self._bytes -= 0 if before is None else len(key) + len(before)
            return self._values.pop(key, None) is not None
        if op == "compare_set":
            expected, desired = values
            if before is None and expected:
                return _encode(expected)
            if before is None or before == expected:
                self._set(key, desired)
            return _encode(self._values[key])
        raise RefusedError(f"unknown operation {op!r}")

    def _set(self, key: str, value: bytes) -> None:
        if len(value) > MOST_VALUE_BYTES:
            raise RefusedError(f"a value of {len(value)} bytes; the store takes {MOST_VALUE_BYTES} at most")
        before = self._values.get(key)
        grown = self._bytes + len(value) + (len(key) if before is None else -len(before))
        if grown > MOST_BYTES:
            raise RefusedError(f"the store is full: {grown} bytes of at most {MOST_BYTES}")
        self._values[key], self._bytes = value, grown


def _checked_key(key: object) -> str:
    if not isinstance(key, str) or len(key.encode()) > MOST_KEY_BYTES:
        raise RefusedError(f"a key is a string of at most {MOST_KEY_BYTES} bytes")
    return key


def _encode(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _decode(value: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise RefusedError(f"not base64: {error}") from None
