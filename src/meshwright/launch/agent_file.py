"""How a new supervisor finds the agent of a run whose supervisor died: ``agent.json`` in the run folder."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

AGENT_FILE = "agent.json"


@dataclass(frozen=True)
class AgentFile:
    """Where the agent of a run listens. Only the user who started the run can read it."""

    pid: int
    host: str
    path: str
    """Path of a Unix socket."""
    token: str
    """A new supervisor must send it first."""

    @classmethod
    def create(cls, socket_path: str) -> AgentFile:
        """The file of this process, with a new token."""
        return cls(os.getpid(), socket.gethostname(), socket_path, secrets.token_hex(16))

    def write(self, run_dir: Path) -> None:
        """Write it with mode 0600."""
        path = run_dir / AGENT_FILE
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)

    @classmethod
    def read(cls, run_dir: Path) -> AgentFile | None:
        """Read that of a run; None if there is none on this host."""
        try:
            found = cls(**json.loads((run_dir / AGENT_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return found if found.host == socket.gethostname() else None

    def is_token(self, given: object) -> bool:
        """Compare a token in constant time."""
        return isinstance(given, str) and hmac.compare_digest(given.encode(), self.token.encode())

    def connect(self) -> socket.socket | None:
        """Connect to the agent; None if it is gone."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(self.path)
        except OSError:
            connection.close()
            return None
        return connection
