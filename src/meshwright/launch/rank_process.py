"""A rank's process as its agent starts it, and the link between the two.

Events go up the link, commands come down. A thread reads the commands, because the main thread may wait in a
collective for a rank that no longer answers.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing import util
from typing import Any, Literal

from meshwright.core.events import Event
from meshwright.launch.channel import Channel, Message
from meshwright.launch.environment import COLLECTIVE_MEMORY_VARIABLE, STORE_VARIABLE
from meshwright.launch.exits import EXIT_PEER_LOST
from meshwright.launch.fence import CommitGuard, HaltedError
from meshwright.launch.requests import Requests
from meshwright.launch.snapshot_slots import SnapshotSlots

STUCK_S = 2.0
"""A rank that was told to leave its collectives and uses no CPU time for this long never leaves them."""
JOIN_STUCK_S = 0.5
"""The same for a rank that joins the others; it may use CPU time, because it polls the rendezvous store."""
STUCK_POLL_S = 0.1
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that a terminal or a scheduler sends to the whole process group."""


@dataclass(frozen=True)
class RankSetup:
    """The settings with which a process becomes a rank. Paths name memory that the agent holds."""

    environment: dict[str, str]
    log: str
    fence: str
    snapshots: str | None = None
    """Memory of in-memory snapshots; None if there are none."""
    retired: dict[str, str] = field(default_factory=dict)
    """Memory of in-memory snapshots of the previous layout, by rank."""


@dataclass(frozen=True)
class RankCommand:
    """A command from the supervisor to a rank."""

    action: Literal["join", "halt", "stop", "fence", "exit", "leave"]
    """``join`` a generation, ``halt`` the current one at once, ``stop`` it after a step with a checkpoint,
    leave it because another process has taken the rank (``fence``), ``exit`` because the run has failed, or
    ``leave`` because it goes on in another layout."""
    generation: int
    store: str | None = None
    """File of the rendezvous store; None for one process."""
    restore_step: int | None = None
    """The in-memory snapshot to go on from."""
    resume_from: str | None = None
    """The checkpoint to go on from, where there is no snapshot. Without both, the run starts again."""
    setup: RankSetup | None = None
    """For a process that becomes a rank with this command."""
    min_position: int = 0
    """Samples that no rank reads again: a rollback skips them."""
    reshard_from: str | None = None
    """The plan, in the run folder, of the layout whose snapshots hold ``restore_step``; None for this one."""
    collective_memory: str | None = None
    """In a ``join``: path of the memory for the collectives of the ranks of this host; the agent adds it."""

    def as_dict(self) -> Message:
        """For a message."""
        return asdict(self)

    @classmethod
    def from_dict(cls, message: Message) -> RankCommand:
        """The command in a message."""
        setup = message["setup"]
        return cls(**{**message, "setup": None if setup is None else RankSetup(**setup)})

    def enter(self) -> None:
        """Set the environment of the rank, and name the store to ``parallel.mesh.init_mesh``."""
        if self.setup is not None:
            os.environ.update(self.setup.environment)
        if self.store is not None:
            os.environ[STORE_VARIABLE] = self.store
        if self.collective_memory is not None:
            os.environ[COLLECTIVE_MEMORY_VARIABLE] = f"{self.generation}:{self.collective_memory}"


class RankLink:
    """The link of a process to its agent. It is called with an event to send it.

    A process has a rank from a command with a ``setup`` until it is fenced. Without a rank it is a spare.
    """

    def __init__(self, channel: Channel) -> None:
        """Take over one end of the link.

        Args:
            channel: To the agent.
        """
        self.commit = CommitGuard()
        self.snapshots: SnapshotSlots | None = None
        """Memory for the snapshots of the rank."""
        self.join_command_at = time.perf_counter()
        """When the newest command to join came; that of the first one: when the process started."""
        self._channel = channel
        self._command: RankCommand | None = None
        """The command to handle next."""
        self._commands: queue.SimpleQueue[RankCommand] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._abort: Callable[[], None] | None = None
        self._joins = False
        """Whether this rank joins the process groups of a generation: it has loaded no state yet."""
        self.requests = Requests(channel)
        """To the supervisor, for the rendezvous store."""
        self.stopped_generation = -1
        """The generation that the supervisor asked to stop after a step."""

    def start(self) -> None:
        """Start reading commands."""
        threading.Thread(target=self._read_commands, name="commands", daemon=True).start()

    def __call__(self, event: Event) -> None:
        """Send an event."""
        with contextlib.suppress(OSError):
            self._channel.send({"is": "event", "event": event})

    def is_halted(self, generation: int) -> bool:
        """Whether the supervisor has ended a generation."""
        return self.commit.is_halted(generation)

    @contextlib.contextmanager
    def aborting(self, generation: int, abort: Callable[[], None]) -> Any:
        """Call ``abort`` from the other thread if the generation is halted inside.

        Raises:
            HaltedError: It is halted already.
        """
        with self._lock:
            if self.is_halted(generation):
                raise HaltedError
            self._abort = abort
        try:
            yield
        finally:
            with self._lock:
                self._abort = None

    @contextlib.contextmanager
    def joining(self) -> Any:
        """Inside, this rank joins the others. It has no state, and exits soon if the generation is halted."""
        self._joins = True
        try:
            yield
        finally:
            self._joins = False

    def wait_for_rank(self) -> RankCommand:
        """Wait as a spare until this process becomes a rank, or must exit."""
        if self._command is None:
            command = self._commands.get()
            while command.setup is None and command.action != "exit":  # for the rank that it was before
                command = self._commands.get()
            self._command = self._take(command)
        command, self._command = self._command, None
        return command

    def assign(self, command: RankCommand) -> None:
        """Let the next ``wait_for_rank`` return this command: the process was started for a rank."""
        self._command = self._take(command)

    def offer_as_spare(self) -> None:
        """Report that this process was fenced, has left its generation, and can become another rank."""
        if self.snapshots is not None:
            self.snapshots.close()
            self.snapshots = None
        with contextlib.suppress(OSError):
            self._channel.send({"is": "offered"})

    def _take(self, command: RankCommand) -> RankCommand:
        setup = command.setup
        if setup is not None:
            self.commit.open(setup.fence)
            self.snapshots = None if setup.snapshots is None else SnapshotSlots.open(setup.snapshots)
            _redirect_output(setup.log)
        self.join_command_at = time.perf_counter()
        if command.action == "join":
            self.commit.begin(command.generation)
        command.enter()
        return command

    def report_failure(self, generation: int, failure: Mapping[str, Any]) -> RankCommand:
        """Report that this rank left a generation, and wait for the next command."""
        with contextlib.suppress(OSError):
            self._channel.send({"is": "failed", "generation": generation, **failure})
        return self._take(self._commands.get())

    def _read_commands(self) -> None:
        while True:
            try:
                messages = self._channel.receive()
            except EOFError:  # the agent is gone
                os._exit(EXIT_PEER_LOST)
            for message in messages:
                if "reply" in message:
                    self.requests.answer(message["reply"])
                    continue
                self._handle_command(RankCommand.from_dict(message))

    def _handle_command(self, command: RankCommand) -> None:
        if command.action in ("halt", "fence"):
            with self._lock:
                self.commit.halt(command.generation)
                self.requests.end(command.generation)
                if self._abort is not None:
                    self._call_abort(self._abort)
                    threading.Thread(target=self._exit_if_stuck, args=(self._abort,), daemon=True).start()
        if command.action == "stop":
            self.stopped_generation = command.generation
        elif command.action != "halt":
            self._commands.put(command)

    def _call_abort(self, abort: Callable[[], None]) -> None:
        """End the collectives. If that fails, this rank does not leave them, and ends."""
        try:
            abort()
        except Exception:
            traceback.print_exc()

    def _exit_if_stuck(self, aborted: Callable[[], None]) -> None:
        """End this process if its main thread neither leaves the generation nor uses CPU time.

        gloo does not end the wait for a message of which a part had arrived (torch 2.13). A wait for another
        rank's key in the store, or for its connection, cannot be ended either, and uses some CPU time.
        """
        clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        used_s, idle_polls, join_polls = 0.0, 0, 0
        while self._abort is aborted:
            before_s, used_s = used_s, time.clock_gettime(clock)
            idle_polls = idle_polls + 1 if used_s == before_s else 0
            join_polls = join_polls + 1 if self._joins else 0
            # Polls, not time: this process may have been stopped.
            if idle_polls * STUCK_POLL_S >= STUCK_S or join_polls * STUCK_POLL_S > JOIN_STUCK_S:
                os.write(2, b"this rank cannot leave its collective; it exits\n")
                os._exit(EXIT_PEER_LOST)
            time.sleep(STUCK_POLL_S)


def run_rank_process(
    connection: socket.socket,
    entry: str,
    run_dir: str,
    environment: Mapping[str, str],
    log: str,
    command: RankCommand | None,
) -> None:
    """Body of a forked process: environment, output, link to the agent; then ``entry``. Does not return.

    Args:
        connection: To the agent.
        entry: ``module:function``, called with ``run_dir`` and the link.
        run_dir: Folder of the run.
        environment: Environment of every rank.
        log: File for the output.
        command: The first one; None for a spare.
    """
    gc.freeze()
    gc.enable()  # disabled by launch.forkserver_preload
    os.environ.update(environment)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):  # the supervisor handles these
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until the rank can stop cleanly
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
    _redirect_output(log)
    link = RankLink(Channel(connection))
    if command is not None:
        link.assign(command)
    link.start()
    module, _, function = entry.partition(":")
    status = getattr(importlib.import_module(module), function)(run_dir, link)
    connection.close()
    util._exit_function()  # type: ignore[attr-defined]  # the cleanup of a child: frees named semaphores
    os._exit(status)  # skips destructors that could wait for lost ranks


def _redirect_output(log: str) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
