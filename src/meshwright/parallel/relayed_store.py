"""The rendezvous store of ranks on several nodes: requests go through the agent to the supervisor.

gloo and NCCL call it from C++. It has no connection of its own: it uses the rank's link to its agent.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from meshwright.launch.rank_process import RankLink

Value = str | bytes


class RelayedStore(dist.Store):
    """A ``torch.distributed.Store`` over the link of this rank. It serves one generation."""

    def __init__(self, link: RankLink, generation: int, timeout: timedelta) -> None:
        """Bind the store to a generation.

        Args:
            link: Link of this rank.
            generation: Whose keys are read and written.
            timeout: Timeout of requests that wait for keys.
        """
        super().__init__()
        self._link, self._generation, self._wait_limit = link, generation, timeout

    def _ask(self, op: str, keys: Sequence[str], timeout: timedelta | None = None, **fields: Any) -> Any:
        limit_s = (timeout or self._wait_limit).total_seconds()
        request = {"op": op, "keys": list(keys), **fields}
        try:
            return self._link.requests.ask(self._generation, request, limit_s)
        except TimeoutError:
            message = f"Timed out after {limit_s:g} s: rendezvous store, {op} of {', '.join(keys)}"
            raise dist.DistStoreError(message) from None
        except ConnectionError as error:
            raise dist.DistStoreError(f"Connection closed by peer: rendezvous store, {error}") from None

    def set(self, key: str, value: Value) -> None:
        """Set a key."""
        self._ask("set", [key], values=[_encode(value)])

    def get(self, key: str) -> bytes:
        """The value of a key; waits until it is set."""
        return base64.b64decode(self._ask("get", [key])["values"][0])

    def add(self, key: str, amount: int) -> int:
        """Add to an integer; returns the sum."""
        return int(self._ask("add", [key], amount=amount)["result"])

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        return bool(self._ask("check", keys)["result"])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        self._ask("wait", keys, timeout)

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Set a key if it has the expected value; returns the value that it has then."""
        result = self._ask("compare_set", [key], values=[_encode(expected), _encode(desired)])["result"]
        return base64.b64decode(result)

    def delete_key(self, key: str) -> bool:
        """Delete a key; returns whether it was there."""
        return bool(self._ask("delete", [key])["result"])

    def num_keys(self) -> int:
        """Number of keys."""
        return int(self._ask("count", [])["result"])

    def append(self, key: str, value: Value) -> None:
        """Append to the value of a key."""
        self._ask("append", [key], values=[_encode(value)])

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of several keys; waits until all are set."""
        return [base64.b64decode(value) for value in self._ask("get", keys)["values"]]

    def multi_set(self, keys: list[str], values: list[Value]) -> None:
        """Set several keys."""
        self._ask("set", keys, values=[_encode(value) for value in values])

    def has_extended_api(self) -> bool:
        """Whether it has ``append``, ``multi_get`` and ``multi_set``."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of requests that wait."""
        self._wait_limit = timeout

    @property
    def timeout(self) -> timedelta:
        """Timeout of requests that wait."""
        return self._wait_limit

    def clone(self) -> RelayedStore:
        """Another handle of the same store."""
        return RelayedStore(self._link, self._generation, self._wait_limit)


def _encode(value: Value) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else bytes(value)).decode()
