"""The agent of this machine, and the fork server that it is forked from.

The fork server imports torch once, in parallel with planning, and stays for further runs of this process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from meshwright.core.processes import without_main
from meshwright.launch.agent import OTHERS_GRACE_S, run_agent
from meshwright.launch.agent_file import AgentFile
from meshwright.launch.channel import Channel, Message
from meshwright.launch.rank_process import GROUP_SIGNALS

ANSWER_S = 5.0
"""How long an agent may take to accept or refuse a new supervisor."""
ENDING_POLL_S = 0.2
"""Between two attempts to adopt an agent whose ranks save and stop."""
MOST_ENDING_S = OTHERS_GRACE_S + 30.0
"""An agent that still refuses after this time does not end."""


class LocalAgent:
    """The supervisor's connection to the agent of this machine."""

    def __init__(self, connection: socket.socket, process: Any | None = None) -> None:
        """Take over a connection.

        Args:
            connection: To the agent.
            process: Process of the agent, if this process started it.
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
        with without_main():
            process.start()
        there.close()
        return cls(here, process)

    @classmethod
    def adopt(cls, run_dir: Path, on_wait: Callable[[], None] = lambda: None) -> LocalAgent | None:
        """Connect to the agent of a run whose supervisor has died; None if it has none.

        An agent refuses while its ranks save and stop. This call then waits until the agent has ended.

        Args:
            run_dir: Folder of the run.
            on_wait: Called once, if the agent refuses.
        """
        deadline, waits = time.monotonic() + MOST_ENDING_S, False
        while True:
            file = AgentFile.read(run_dir)
            connection = None if file is None else file.connect()
            if file is None or connection is None:
                return None
            agent = cls(connection)
            agent.send({"token": file.token})
            if time.monotonic() >= deadline or _is_answered(connection):
                return agent
            connection.close()
            if not waits:
                on_wait()
            waits = True
            time.sleep(ENDING_POLL_S)

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


def _is_answered(connection: socket.socket) -> bool:
    """Whether the agent answers, and does not close the connection."""
    connection.settimeout(ANSWER_S)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except TimeoutError:  # it may be stopped
        return True
    except OSError:
        return False
    finally:
        connection.settimeout(None)


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
