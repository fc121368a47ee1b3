"""A rank's process as its agent starts it, and the link between the two.

Events go up the link, orders come down. A thread reads the orders, because the main thread may wait in a
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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from multiprocessing import util
from typing import Any, Literal

from meshwright.core.events import Event
from meshwright.launch.channel import Channel, Message
from meshwright.launch.environment import STORE_VARIABLE
from meshwright.launch.exits import EXIT_PEER_LOST
from meshwright.launch.snapshot_memory import SnapshotMemory

GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that a terminal or a scheduler sends to the whole process group."""


@dataclass(frozen=True)
class Order:
    """What the supervisor tells a rank to do."""

    action: Literal["join", "halt", "exit"]
    """``join`` a generation, ``halt`` the current one, or ``exit`` because the run has failed."""
    generation: int
    store: str | None = None
    """File of the rendezvous store; None for one process."""
    restore_step: int | None = None
    """The in-memory snapshot to go on from."""
    resume_from: str | None = None
    """The checkpoint to go on from, where there is no snapshot. Without both, the run starts again."""

    def as_dict(self) -> Message:
        """For a message."""
        return asdict(self)

    def enter(self) -> None:
        """Name the rendezvous store of the generation to ``parallel.mesh.init_mesh``."""
        if self.store is not None:
            os.environ[STORE_VARIABLE] = self.store


class RankLink:
    """The link of a rank to its agent. It is called with an event to send it."""

    def __init__(self, channel: Channel, first_order: Order, snapshots: SnapshotMemory | None) -> None:
        """Take over one end of the link.

        Args:
            channel: To the agent.
            first_order: The generation to join first.
            snapshots: Memory for snapshots.
        """
        self.first_order, self.snapshots = first_order, snapshots
        self.ordered_at = time.perf_counter()
        """When the newest order to join came; that of the first one: when the process started."""
        self._channel = channel
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._halted_generation = -1
        self._abort: Callable[[], None] | None = None

    def start(self) -> None:
        """Start reading orders."""
        threading.Thread(target=self._read_orders, name="orders", daemon=True).start()

    def __call__(self, event: Event) -> None:
        """Send an event."""
        with contextlib.suppress(OSError):
            self._channel.send({"is": "event", "event": event})

    def is_halted(self, generation: int) -> bool:
        """Whether the supervisor has ended a generation."""
        return self._halted_generation >= generation

    @contextlib.contextmanager
    def aborting(self, generation: int, abort: Callable[[], None]) -> Any:
        """Call ``abort`` from the other thread if the generation is halted inside."""
        with self._lock:
            self._abort = abort
            if self.is_halted(generation):
                abort()
        try:
            yield
        finally:
            with self._lock:
                self._abort = None

    def report_failure(self, generation: int, failure: Mapping[str, Any]) -> Order:
        """Report that this rank left a generation, and wait for the next order."""
        with contextlib.suppress(OSError):
            self._channel.send({"is": "failed", "generation": generation, **failure})
        order = self._orders.get()
        self.ordered_at = time.perf_counter()
        return order

    def _read_orders(self) -> None:
        while True:
            try:
                messages = self._channel.receive()
            except EOFError:  # the agent is gone
                os._exit(EXIT_PEER_LOST)
            for message in messages:
                self._obey(Order(**message))

    def _obey(self, order: Order) -> None:
        if order.action != "halt":
            self._orders.put(order)
            return
        with self._lock:
            self._halted_generation = order.generation
            if self._abort is not None:
                self._abort()


def run_rank_process(
    connection: socket.socket,
    entry: str,
    run_dir: str,
    environment: Mapping[str, str],
    log: str,
    order: Order,
    snapshots: SnapshotMemory | None,
) -> None:
    """Body of a forked rank: environment, output, link to the agent; then ``entry``. Does not return."""
    gc.freeze()
    gc.enable()  # disabled by launch.forkserver_preload
    os.environ.update(environment)
    order.enter()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):  # the supervisor handles these
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until the rank can stop cleanly
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
    with contextlib.suppress(OSError):
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
    link = RankLink(Channel(connection), order, snapshots)
    link.start()
    module, _, function = entry.partition(":")
    status = getattr(importlib.import_module(module), function)(run_dir, link)
    connection.close()
    util._exit_function()  # type: ignore[attr-defined]  # the cleanup of a child: frees named semaphores
    os._exit(status)  # skips destructors that could wait for lost ranks
