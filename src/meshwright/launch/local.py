"""The agent of this machine, and the fork server that it is forked from.

The fork server imports torch once, in parallel with planning, and stays for further runs of this process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.launch.agent import run_agent
from meshwright.launch.agent_file import AgentFile
from meshwright.launch.channel import Channel, Message
from meshwright.launch.rank_process import GROUP_SIGNALS


class LocalAgent:
    """The supervisor's connection to the agent of this machine."""

    def __init__(self, connection: socket.socket, process: Any | None = None) -> None:
        """Take over a connection.

        Args:
            connection: To the agent.
            process: Of the agent, if this process started it.
        """
        self._channel, self._process = Channel(connection), process

    @classmethod
    def start(cls, preload: Sequence[str]) -> LocalAgent:
        """Start an agent.

        Args:
            preload: Modules that the fork server imports.
        """
        start_server(preload)
        here, there = socket.socketpair()
        context: Any = multiprocessing.get_context("forkserver")
        process = context.Process(target=run_agent, args=(there,), name="agent", daemon=False)
        with _without_main():
            process.start()
        there.close()
        return cls(here, process)

    @classmethod
    def adopt(cls, run_dir: Path) -> LocalAgent | None:
        """Connect to the agent of a run whose supervisor has died; None if it has none."""
        file = AgentFile.read(run_dir)
        connection = None if file is None else file.connect()
        if file is None or connection is None:
            return None
        agent = cls(connection)
        agent.send({"token": file.token})
        return agent

    def send(self, message: Message) -> None:
        """Send a message; an agent that is gone is noticed by ``receive``."""
        with contextlib.suppress(OSError):
            self._channel.send(message)

    def fileno(self) -> int:
        """For ``selectors``."""
        return self._channel.fileno()

    def receive(self) -> list[Message]:
        """The messages that have arrived; waits for the first bytes.

        Raises:
            EOFError: The agent is gone.
        """
        return self._channel.receive()

    def close(self) -> None:
        """End the agent and all its ranks, and wait for it."""
        self.send({"do": "end"})
        self._channel.close()
        if self._process is not None:
            self._process.join()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep multiprocessing from importing the caller's main module in the ranks.

    Ranks are started by the name of a function. A script without ``if __name__ == "__main__"`` would start
    ranks in every rank.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def start_server(preload: Sequence[str]) -> None:
    """Start a fork server that imports these modules; returns before it is ready.

    A server of an earlier launch that lacks some of them is replaced.
    """
    server: Any = forkserver._forkserver
    if not set(preload) <= set(server._preload_modules):
        end_server()
    if server._forkserver_pid is None:
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(preload))
    _start_forkserver()


def end_server() -> None:
    """Kill the fork server, even during an import; otherwise it exits with this process."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


def _start_forkserver() -> None:
    """Start the fork server with signals to the process group blocked.

    They are blocked, not ignored: signals that arrive meanwhile stay pending, and the server inherits the
    mask. Starting multiprocessing's resource tracker unblocks them in this process, so it is started first
    and the mask is set again.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
