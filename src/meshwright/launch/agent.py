"""The agent of a node: starts that node's ranks, watches them, and keeps their snapshots.

It is a process of its own between the supervisor and the ranks. It passes events to the supervisor and orders
to the ranks, and decides nothing. It is forked from the fork server, which has imported torch, and forks the
ranks. When the supervisor is gone, it kills the ranks and exits.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import tempfile
import traceback
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from meshwright.core.flight_ring import FLIGHT_VARIABLE, FlightMemory
from meshwright.launch.channel import Channel, Message
from meshwright.launch.rank_process import Order, run_rank_process
from meshwright.launch.snapshot_memory import SnapshotMemory

POLL_S = 0.2
"""Interval of looking for ended ranks, where the system has no pidfd."""


@dataclass
class _Process:
    """A process of a rank."""

    rank: int
    pid: int
    pidfd: int
    """-1 where the system has none."""
    channel: Channel
    fenced: bool = False
    """Whether another process has taken its place."""


@dataclass
class Agent:
    """The agent of one node."""

    supervisor: Channel
    store_dir: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="meshwright-"))
    """Folder of the rendezvous stores, one file per generation; only this user can read it."""
    processes: list[_Process] = field(default_factory=list)
    snapshots: dict[int, SnapshotMemory] = field(default_factory=dict)
    """By rank."""
    recorders: dict[int, FlightMemory] = field(default_factory=dict)
    """The flight recorder of each rank's newest process."""
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def run(self) -> None:
        """Serve the supervisor until it ends the agent or is gone."""
        self.supervisor.setblocking(False)
        self.selector.register(self.supervisor, selectors.EVENT_READ, self._read_supervisor)
        self._report({"is": "hello", "pid": os.getpid(), "store_dir": self.store_dir})
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    for key, _ in self.selector.select(None if self._has_pidfds() else POLL_S):
                        key.data()
                    self._reap()
                    self.supervisor.flush()
                    mask = selectors.EVENT_READ | (self.supervisor.has_output and selectors.EVENT_WRITE)
                    self.selector.modify(self.supervisor, mask, self._read_supervisor)
        finally:
            self._end_all()
            shutil.rmtree(self.store_dir, ignore_errors=True)

    def _has_pidfds(self) -> bool:
        return all(process.pidfd >= 0 for process in self.processes)

    def _report(self, message: Message) -> None:
        self.supervisor.queue(message)

    def _read_supervisor(self) -> None:
        for message in self.supervisor.receive():
            getattr(self, f"_do_{message.pop('do')}")(**message)

    def _do_start(
        self,
        rank: int,
        entry: str,
        run_dir: str,
        environment: dict[str, str],
        log: str,
        order: Message,
        keep_snapshots: bool,
    ) -> None:
        """Fork a process for a rank. One that held the rank before is fenced."""
        for process in self._of(rank):
            self._fence(process)
        if keep_snapshots and rank not in self.snapshots:
            self.snapshots[rank] = SnapshotMemory.create(rank)
        if rank in self.recorders:
            self.recorders[rank].close()
        recorder = self.recorders[rank] = FlightMemory.create(rank)
        environment = {**environment, FLIGHT_VARIABLE: recorder.path}
        self._report({"is": "recorder", "rank": rank, "path": recorder.path})
        here, there = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                self._close_in_child(here)
                memory = self.snapshots.get(rank)
                run_rank_process(there, entry, run_dir, environment, log, Order(**order), memory)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        there.close()
        here.setblocking(False)
        pidfd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
        process = _Process(rank, pid, pidfd, Channel(here))
        self.processes.append(process)
        self.selector.register(process.channel, selectors.EVENT_READ, partial(self._read_rank, process))
        if pidfd >= 0:
            self.selector.register(pidfd, selectors.EVENT_READ, lambda: None)

    def _close_in_child(self, here: socket.socket) -> None:
        """Close what belongs to the agent: a rank must see its own link close, and no other."""
        self.selector.close()
        here.close()
        self.supervisor.close()
        for process in self.processes:
            process.channel.close()
            if process.pidfd >= 0:
                os.close(process.pidfd)

    def _do_order(self, rank: int, order: Message) -> None:
        for process in self._of(rank):
            with contextlib.suppress(OSError):
                process.channel.queue(order)

    def _do_signal(self, rank: int, number: int) -> None:
        for process in self._of(rank):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _do_list_snapshots(self) -> None:
        steps = {str(rank): memory.steps() for rank, memory in self.snapshots.items()}
        self._report({"is": "snapshots", "steps": steps})

    def _do_end(self) -> None:
        raise EOFError("the supervisor ended the agent")

    def _of(self, rank: int) -> list[_Process]:
        return [process for process in self.processes if process.rank == rank and not process.fenced]

    def _fence(self, process: _Process) -> None:
        """Take the rank away from a process that does not answer.

        It may wake up and go on writing: its snapshots are copied for its successor.
        """
        process.fenced = True
        if process.rank in self.snapshots:
            memory = self.snapshots[process.rank]
            self.snapshots[process.rank] = memory.copy(process.rank)
            memory.close()

    def _read_rank(self, process: _Process) -> bool:
        """Relay what a process has sent; returns whether there was something."""
        try:
            messages = process.channel.receive()
        except EOFError:
            self.selector.unregister(process.channel)
            process.channel.close()
            return False
        for message in messages if not process.fenced else []:
            self._report({**message, "rank": process.rank, "pid": process.pid})
        return bool(messages)

    def _reap(self) -> None:
        """Report processes that have ended, after their last message."""
        for process in list(self.processes):
            pid, status = os.waitpid(process.pid, os.WNOHANG)
            if pid == 0:
                continue
            while process.channel.fileno() >= 0 and self._read_rank(process):
                pass
            if process.channel.fileno() >= 0:  # inherited by a process that the rank started
                self.selector.unregister(process.channel)
                process.channel.close()
            self.processes.remove(process)
            if process.pidfd >= 0:
                self.selector.unregister(process.pidfd)
                os.close(process.pidfd)
            if not process.fenced:
                code = os.waitstatus_to_exitcode(status)
                self._report({"is": "exited", "rank": process.rank, "pid": process.pid, "status": code})

    def _end_all(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for process in self.processes:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, 0)


def run_agent(connection: socket.socket, *_: Any) -> None:
    """Entry of the agent's process."""
    os.setsid()
    Agent(Channel(connection)).run()
