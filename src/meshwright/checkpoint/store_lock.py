"""The lock of checkpoints in an object store: an object that names its owner, which renews it.

It is taken by a conditional put, so of two processes one gets it. If the owner runs on this machine, its
process id says whether it is alive. Otherwise its renewals do: an owner that has not renewed the lock for
``LEASE_S`` has ended. That time is measured here, on a monotonic clock.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from meshwright.core.errors import Problem, UserError
from meshwright.core.object_path import ObjectPath

LOCK_OBJECT = "lock.json"
RENEW_S = 10.0
LEASE_S = 30.0
POLL_S = 0.5


class StoreLock:
    """The lock, held and renewed from ``take`` to the end of the ``with`` block."""

    def __init__(self, path: ObjectPath) -> None:
        self._path, self._tag, self._renewals = path, "", 0
        self._owner = {**_describe_process(), "nonce": secrets.token_hex(8)}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lock of a store", daemon=True)

    @classmethod
    def take(cls, root: ObjectPath) -> StoreLock:
        """Lock the checkpoints below a prefix.

        Raises:
            UserError: Another process has the lock.
            OSError: The store cannot be reached.
        """
        lock = cls(root / LOCK_OBJECT)
        while not lock._try_to_take(root):
            pass  # the owner released it, or another process took it over
        lock._thread.start()
        return lock

    def __enter__(self) -> StoreLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        try:
            if self._holds_lock():
                self._path.unlink(missing_ok=True)
        except OSError:
            pass  # it is taken over after LEASE_S

    def _try_to_take(self, root: ObjectPath) -> bool:
        """Create the lock, or replace that of an owner that has ended; False if others were faster."""
        try:
            self._path.create(self._content())
            self._tag = self._path.read_with_tag()[1]
        except FileExistsError:
            try:
                self._take_over(root)
            except (FileExistsError, FileNotFoundError):
                return False
        return True

    def _take_over(self, root: ObjectPath) -> None:
        """Replace the lock of an owner that has ended.

        Raises:
            UserError: It has not.
            OSError: Others were faster.
        """
        content, tag = self._path.read_with_tag()
        owner = _parse(content)
        deadline = time.monotonic() + LEASE_S
        while not _has_ended(owner) and time.monotonic() < deadline:
            time.sleep(POLL_S)  # a renewal is another version of the object
            seen = self._path.read_with_tag()[1]
            if seen != tag or _is_alive_here(owner):
                holder = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
                rule = f"is in use by another meshwright ({holder})"
                fix = "Wait for it, or use another checkpoint.dir"
                raise UserError(Problem("checkpoint-dir-busy", rule, path=str(root), fix=fix))
        self._tag = self._path.replace_version(self._content(), tag)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            self._renewals += 1
            try:
                self._tag = self._path.replace_version(self._content(), self._tag)
            except FileExistsError:
                if not self._holds_lock():
                    return  # it was taken over: this process had not renewed it for LEASE_S
            except OSError:
                continue  # the store does not answer now

    def _holds_lock(self) -> bool:
        """Whether a renewal has arrived whose answer was lost."""
        try:
            content, tag = self._path.read_with_tag()
        except OSError:
            return True  # to be seen at the next renewal
        if _parse(content).get("nonce") != self._owner["nonce"]:
            return False
        self._tag = tag
        return True

    def _content(self) -> bytes:
        return json.dumps({**self._owner, "renewals": self._renewals}).encode()


def _describe_process() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "started": _read_start(os.getpid()),
        "host": socket.gethostname(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip(),
        "pid_namespace": str(Path("/proc/self/ns/pid").readlink()),
    }


def _read_start(pid: Any) -> str | None:
    """When a process started, in ticks since the boot: process ids are used again."""
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, ValueError, TypeError, IndexError):
        return None


def _parse(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_here(owner: dict[str, Any]) -> bool:
    """Whether the owner's process id means a process of this machine, and of this container."""
    mine = _describe_process()
    return all(owner.get(key) == mine[key] for key in ("boot", "pid_namespace"))


def _is_alive_here(owner: dict[str, Any]) -> bool:
    started = _read_start(owner.get("pid"))
    return _is_here(owner) and started is not None and started == owner.get("started")


def _has_ended(owner: dict[str, Any]) -> bool:
    return _is_here(owner) and not _is_alive_here(owner)
