"""The agent of a node: starts that node's ranks and spares, watches them, and keeps their snapshots.

It is a process of its own between the supervisor and the ranks. It passes events to the supervisor and
commands to the ranks, and decides nothing. It is forked from the fork server, which has imported torch, and
forks the ranks. When the supervisor is gone, the ranks go on for ``orphan_s`` seconds, in which a new
supervisor can adopt them. Then they save a checkpoint and stop. The agent of node 0 also waits if all ranks
of the run are on other nodes: through it a new supervisor knows that they train.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import shutil
import signal
import socket
import tempfile
import time
import traceback
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from meshwright.core.flight_ring import FLIGHT_VARIABLE, FlightMemory
from meshwright.launch.acceptor import Acceptor
from meshwright.launch.agent_file import AgentFile
from meshwright.launch.channel import Channel, Message
from meshwright.launch.collective_memory import CollectiveMemory
from meshwright.launch.exits import EXIT_PEER_LOST
from meshwright.launch.fence import Fence
from meshwright.launch.rank_process import RankCommand, RankSetup, run_rank_process
from meshwright.launch.snapshot_slots import EMPTY, SnapshotSlots

POLL_S = 0.2
"""Interval of looking for ended ranks, where the system has no pidfd."""


ORPHAN_GRACE_S = 30.0
"""How long ranks without a supervisor have to save and stop."""
OTHERS_GRACE_S = 45.0
"""The same for ranks of other nodes, whose agents may notice the loss of the supervisor later."""
REPORTS_KEPT_FOR_SUPERVISOR = ("failed", "fenced", "rejoined")
"""Reports from the time without a supervisor, for the next one; it gets exits and the run folder, too."""
HELLO_TIMEOUT_S = 1.0
"""How long the agent waits for the token of a new supervisor."""


class EndedError(Exception):
    """The supervisor has ended the agent."""


@dataclass
class _Process:
    """A process that has a rank, had one (fenced), or waits for one (a spare)."""

    pid: int
    pidfd: int
    """-1 where the system has none."""
    channel: Channel
    rank: int | None = None
    """None for a spare."""
    fence: Fence | None = None
    """Fence of the rank that it has or had."""
    fenced: bool = False
    """Whether another process has taken its place."""

    @property
    def is_spare(self) -> bool:
        return self.rank is None

    @property
    def is_rank(self) -> bool:
        return self.rank is not None and not self.fenced

    @property
    def is_stopped(self) -> bool:
        """Whether a signal stopped it: it cannot take a command."""
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
            return stat.rpartition(")")[2].split()[0] in ("T", "t")
        return False

    def send(self, command: RankCommand) -> None:
        """Send a command; one that is gone is noticed by its exit."""
        with contextlib.suppress(OSError):
            self.channel.queue(command.as_dict())

    def signal(self, number: int) -> None:
        """Send a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


@dataclass
class Agent:
    """The agent of one node."""

    supervisor: Channel | None
    """None after it is gone."""
    store_dir: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="meshwright-"))
    """Folder of the rendezvous stores, one file per generation; only this user can read it."""
    processes: list[_Process] = field(default_factory=list)
    snapshots: dict[int, SnapshotSlots] = field(default_factory=dict)
    """By rank."""
    retired: dict[int, SnapshotSlots] = field(default_factory=dict)
    """Snapshots of the previous layout, by its ranks, until the ranks of the new one have loaded them."""
    retired_from: int = 0
    """First generation of the layout that wrote them."""
    layout_generation: int = 0
    """First generation of the layout that writes ``snapshots``."""
    announced_generation: int = -1
    """First generation of the newest layout that the supervisor has announced."""
    recorders: dict[int, FlightMemory] = field(default_factory=dict)
    """The flight recorder of each rank's newest process."""
    collectives: CollectiveMemory = field(default_factory=CollectiveMemory)
    """Through which the ranks of this node exchange collectives."""
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    orphan_s: float = 0.0
    """How long the ranks go on without a supervisor; 0: they are killed."""
    spares: int = 0
    """Processes without a rank to keep."""
    start_arguments: dict[str, Any] = field(default_factory=dict)
    """Of the newest rank: ``entry``, ``run_dir``, ``environment`` and ``log``."""
    generation: int = 0
    """The newest that a rank was told to join."""
    unreported: list[Message] = field(default_factory=list)
    """Failures since the supervisor is gone."""
    exits: dict[int, Message] = field(default_factory=dict)
    """The exits of ranks that have no new process yet; a supervisor may have died before it read them."""
    deadline: float = math.inf
    """When the ranks are told to stop; after that, when they are killed."""
    stopping: bool = False
    others_train: bool = False
    """Whether all ranks of the run are on other nodes."""
    listener: socket.socket | None = None
    """Accepts a new supervisor."""
    acceptor: Acceptor | None = None
    """Accepts connections of the listener."""
    file: AgentFile | None = None

    def run(self) -> None:
        """Serve supervisors until one ends the agent, or none comes."""
        assert self.supervisor is not None, "the first supervisor starts the agent"
        self._attach(self.supervisor)
        self._report({"is": "hello", "pid": os.getpid(), "store_dir": self.store_dir})
        try:
            while self._serve():
                pass
        finally:
            self._end_all()
            if self.listener is not None:
                self.listener.close()
            shutil.rmtree(self.store_dir, ignore_errors=True)

    def _serve(self) -> bool:
        """Handle what has happened; returns whether to go on."""
        timeout = self.deadline - time.monotonic() if self.deadline < math.inf else None
        paused = self.acceptor is not None and self.acceptor.resume_at is not None
        if paused or not all(process.pidfd >= 0 for process in self.processes):
            timeout = min(timeout or POLL_S, POLL_S)
        try:
            events = self.selector.select(timeout)
            self._reap()  # first: a process that ended is the cause of what the others report
            for key, _ in events:
                key.data()
            self._flush()
        except EndedError:
            return False
        if self.acceptor is not None:
            self.acceptor.poll()
        waits = self.others_train or any(process.is_rank for process in self.processes)
        if self.supervisor is None and not (self.orphan_s > 0 and waits):
            return False
        if time.monotonic() >= self.deadline:
            return self._end_orphans()
        return True

    def _attach(self, supervisor: Channel) -> None:
        self.supervisor, self.deadline = supervisor, math.inf
        supervisor.setblocking(False)
        self.selector.register(supervisor, selectors.EVENT_READ, self._read_supervisor)

    def _lose_supervisor(self) -> None:
        """The supervisor is gone; the ranks may go on for a while."""
        assert self.supervisor is not None, "it is lost once"
        self.selector.unregister(self.supervisor)
        self.supervisor.close()
        self.supervisor, self.deadline = None, time.monotonic() + self.orphan_s

    def _end_orphans(self) -> bool:
        """No supervisor came: the ranks save and stop; those that cannot are killed."""
        if self.stopping:
            return False
        grace_s = OTHERS_GRACE_S if self.others_train else ORPHAN_GRACE_S
        self.stopping, self.deadline = True, time.monotonic() + grace_s
        for process in self.processes:
            process.signal(signal.SIGTERM if process.is_rank else signal.SIGKILL)
        return True

    def _flush(self) -> None:
        """Send what is queued, and wait for room to send the rest."""
        for process in self.processes:
            if process.channel.fileno() >= 0:
                with contextlib.suppress(OSError):  # one that is gone is noticed by its exit
                    process.channel.flush()
                self._await_room(process.channel)
        if self.supervisor is not None:
            try:
                self.supervisor.flush()
            except OSError:
                self._lose_supervisor()
                return
            self._await_room(self.supervisor)

    def _await_room(self, channel: Channel) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_output else 0)
        self.selector.modify(channel, events, self.selector.get_key(channel).data)

    def _report(self, message: Message) -> None:
        if message["is"] in REPORTS_KEPT_FOR_SUPERVISOR:
            self.unreported.append(message)
        if self.supervisor is not None:
            try:
                self.supervisor.queue(message)
            except OSError:
                self._lose_supervisor()
                return
            self.unreported.clear()

    def _read_supervisor(self) -> None:
        if self.supervisor is None:  # lost since it could be read
            return
        try:
            messages = self.supervisor.receive()
        except EOFError:
            self._lose_supervisor()
            return
        for message in messages:
            getattr(self, f"_do_{message.pop('do')}")(**message)

    def _do_configure(self, run_dir: str, orphan_s: float) -> None:
        """Let ranks outlive the supervisor: listen for a new one, and release its terminal."""
        self.orphan_s = orphan_s
        path = f"{self.store_dir}/agent.sock"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(path)
        self.listener.listen(4)
        self.file = AgentFile.create(path)
        self.listener.setblocking(False)
        self.acceptor = Acceptor(self.listener, self.selector, self._accept)
        with contextlib.suppress(OSError):
            self.file.write(Path(run_dir))
        with contextlib.suppress(OSError):
            fd = os.open(f"{run_dir}/logs/agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            os.close(fd)

    def _accept(self) -> None:
        """Let a new supervisor adopt the ranks, if there is none and it knows the token."""
        assert self.acceptor is not None, "it has a connection"
        assert self.file is not None, "it is written before"
        connection = self.acceptor.accept()
        if connection is None:
            return
        connection.settimeout(HELLO_TIMEOUT_S)
        channel = Channel(connection)
        try:
            messages = channel.receive()
        except EOFError:
            messages = []
        known = len(messages) == 1 and self.file.is_token(messages[0].get("token"))
        if self.supervisor is not None or self.stopping or not known:
            channel.close()
            return
        self._attach(channel)
        missed, self.unreported = self.unreported, []
        ranks = [process.rank for process in self.processes if process.is_rank]
        self._report(
            {"is": "adopted", "store_dir": self.store_dir, "generation": self.generation, "ranks": ranks}
        )
        recorders = [{"is": "recorder", "rank": rank, "path": r.path} for rank, r in self.recorders.items()]
        for message in (*recorders, *self.exits.values(), *missed):
            self._report(message)

    def _do_start(
        self,
        rank: int,
        entry: str,
        run_dir: str,
        environment: dict[str, str],
        log: str,
        command: Message,
        keep_snapshots: bool,
        layout_generation: int,
    ) -> None:
        """Give a rank to a spare, or to a new process."""
        self.layout_generation = layout_generation
        self.start_arguments = {"entry": entry, "run_dir": run_dir, "environment": environment, "log": log}
        self.generation = max(self.generation, command["generation"])
        self.exits.pop(rank, None)
        if keep_snapshots and rank not in self.snapshots:
            self.snapshots[rank] = SnapshotSlots.create(rank)
        if rank in self.recorders:
            self.recorders[rank].close()
        recorder = self.recorders[rank] = FlightMemory.create(rank)
        self._report({"is": "recorder", "rank": rank, "path": recorder.path})
        environment = {**environment, FLIGHT_VARIABLE: recorder.path}
        fence, memory = Fence(), self.snapshots.get(rank)
        retired = {str(rank): memory.path for rank, memory in self.retired.items()}
        setup = RankSetup(environment, log, fence.path, None if memory is None else memory.path, retired)
        first = replace(self._complete(command), setup=setup)
        process = next((p for p in self.processes if p.is_spare and not p.is_stopped), None)
        if process is None:
            process = self._fork(entry, run_dir, environment, log, first, fence)
        else:
            process.send(first)
        process.rank, process.fence = rank, fence

    def _do_keep_spares(
        self, count: int, entry: str, run_dir: str, environment: dict[str, str], log: str
    ) -> None:
        """Keep a number of spares: start those that are missing."""
        self.spares = count
        for _ in range(count - sum(process.is_spare for process in self.processes)):
            self._fork(entry, run_dir, environment, log)

    def _fork(
        self,
        entry: str,
        run_dir: str,
        environment: dict[str, str],
        log: str,
        command: RankCommand | None = None,
        fence: Fence | None = None,
    ) -> _Process:
        """Start a process, for a rank or as a spare."""
        here, there = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                self._close_in_child(here)
                if fence is not None:  # it opens its own: this one would share the agent's lock
                    fence.close()
                run_rank_process(there, entry, run_dir, environment, log, command)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        there.close()
        here.setblocking(False)
        pidfd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
        process = _Process(pid, pidfd, Channel(here))
        self.processes.append(process)
        self.selector.register(process.channel, selectors.EVENT_READ, partial(self._read_rank, process))
        if pidfd >= 0:
            self.selector.register(pidfd, selectors.EVENT_READ, lambda: None)
        return process

    def _close_in_child(self, here: socket.socket) -> None:
        """Close what belongs to the agent: a rank must see its own link close, and hold no other's memory."""
        self.selector.close()
        here.close()
        if self.supervisor is not None:
            self.supervisor.close()
        if self.listener is not None:
            self.listener.close()
        for process in self.processes:
            process.channel.close()
            if process.pidfd >= 0:
                os.close(process.pidfd)
            if process.fence is not None:
                process.fence.close()
        for snapshots in (*self.snapshots.values(), *self.retired.values()):
            snapshots.close()
        for recorder in self.recorders.values():
            recorder.close()
        self.collectives.close()

    def _do_command(self, rank: int, command: Message) -> None:
        self.generation = max(self.generation, command["generation"])
        for process in self._of(rank):
            process.send(self._complete(command))

    def _complete(self, command: Message) -> RankCommand:
        """Name the memory for collectives in a command to join a generation."""
        read = RankCommand.from_dict(command)
        if read.action != "join":
            return read
        return replace(read, collective_memory=self.collectives.path(read.generation))

    def _do_reply(self, rank: int, reply: Message) -> None:
        """Pass on what the supervisor replies to a rank's request."""
        for process in self._of(rank):
            with contextlib.suppress(OSError):
                process.channel.queue({"reply": reply})

    def _do_signal(self, rank: int, number: int) -> None:
        for process in self._of(rank):
            process.signal(number)

    def _do_fence(self, rank: int) -> None:
        """Take the rank away from a process that does not answer.

        It commits nothing when it wakes up. Its snapshots are copied for its successor, because it may be
        writing to them. One that cannot be fenced is killed: it is inside a commit, or memory is short.
        """
        for process in self._of(rank):
            while self._read_rank(process):
                pass
            assert process.fence is not None, "it has a rank"
            if not (process.fence.shut() and self._copy_snapshots(rank)):
                process.signal(signal.SIGKILL)
                continue
            process.fenced = True
            process.send(RankCommand("fence", self.generation))
            self._report({"is": "fenced", "rank": rank, "pid": process.pid, "generation": self.generation})

    def _copy_snapshots(self, rank: int) -> bool:
        """Let the successor of a process have its own memory; returns False if there is not enough."""
        memory = self.snapshots.get(rank)
        if memory is not None:
            try:
                self.snapshots[rank] = memory.copy(rank)
            except OSError:
                return False
            memory.close()
        return True

    def _do_list_snapshots(self) -> None:
        steps = {str(rank): memory.steps() for rank, memory in self.snapshots.items()}
        self._report({"is": "snapshots", "steps": steps})

    def _do_begin_layout(self, generation: int, others_train: bool = False) -> None:
        """All ranks have ended, and the run goes on in another layout: keep what they left for its ranks."""
        self.others_train = others_train
        if generation != self.announced_generation:
            self.announced_generation = generation
            if any(step != EMPTY for memory in self.snapshots.values() for step in memory.steps()):
                self._do_drop_retired()
                self.retired, self.retired_from = self.snapshots, self.layout_generation
            else:  # no rank of that layout had loaded its state
                for memory in self.snapshots.values():
                    memory.close()
            self.snapshots = {}
            for recorder in self.recorders.values():
                recorder.close()
            self.recorders, self.exits = {}, {}
            self.unreported.clear()
        steps = {str(rank): memory.steps() for rank, memory in self.retired.items()}
        facts = {"generation": generation, "retired_from": self.retired_from, "steps": steps}
        self._report({"is": "retired", **facts})

    def _do_drop_retired(self) -> None:
        """Free the snapshots of the previous layout."""
        for memory in self.retired.values():
            memory.close()
        self.retired = {}

    def _do_end(self) -> None:
        raise EndedError

    def _of(self, rank: int) -> list[_Process]:
        return [process for process in self.processes if process.rank == rank and process.is_rank]

    def _read_rank(self, process: _Process) -> bool:
        """Relay what a process has sent; returns whether there was something."""
        if process.channel.fileno() < 0:  # it ended, and all that it had sent is relayed
            return False
        try:
            messages = process.channel.receive()
        except EOFError:
            self.selector.unregister(process.channel)
            process.channel.close()
            return False
        for message in messages:
            if message["is"] == "offered":
                self._keep_or_end(process)
            elif process.is_rank:
                self._report({**message, "rank": process.rank, "pid": process.pid})
        return bool(messages)

    @property
    def _needs_spare(self) -> bool:
        """Whether a fenced process that woke up is kept: there is at most one more spare for each of them."""
        spares = sum(other.is_spare for other in self.processes)
        return spares < self.spares + sum(other.fenced for other in self.processes)

    def _report_rejoined(self, process: _Process, pid: int | None) -> None:
        former = {"former_rank": process.rank, "former_pid": process.pid}
        self._report({"is": "rejoined", **former, "pid": pid})

    def _keep_or_end(self, process: _Process) -> None:
        """Make a fenced process that woke up a spare, unless there are enough."""
        assert process.fence is not None, "it had a rank"
        kept = self._needs_spare
        self._report_rejoined(process, process.pid if kept else None)
        if kept:
            process.fence.close()
            process.rank, process.fence, process.fenced = None, None, False
        else:
            process.send(RankCommand("exit", self.generation))

    def _reap(self) -> None:
        """Report processes that have ended, after their last message."""
        for process in list(self.processes):
            pid, status = os.waitpid(process.pid, os.WNOHANG)
            if pid == 0:
                continue
            while self._read_rank(process):
                pass
            if process.channel.fileno() >= 0:  # inherited by a process that the rank started
                self.selector.unregister(process.channel)
                process.channel.close()
            code = os.waitstatus_to_exitcode(status)
            if process.fenced and code == EXIT_PEER_LOST and self._needs_spare:  # it woke up, and was stuck
                self._report_rejoined(process, self._fork(**self.start_arguments).pid)
            self.processes.remove(process)
            if process.pidfd >= 0:
                self.selector.unregister(process.pidfd)
                os.close(process.pidfd)
            if process.fence is not None:
                process.fence.close()
            if process.rank is not None and process.is_rank:
                exited = {"is": "exited", "rank": process.rank, "pid": process.pid, "status": code}
                self.exits[process.rank] = exited
                self._report(exited)

    def _end_all(self) -> None:
        for process in self.processes:
            process.signal(signal.SIGKILL)
        for process in self.processes:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, 0)


def run_agent(connection: socket.socket, *_: Any) -> None:
    """Entry of the agent's process."""
    os.setsid()
    _release_servers()
    Agent(Channel(connection)).run()


def _release_servers() -> None:
    """Close the pipes to multiprocessing's fork server and resource tracker.

    They would live as long as the agent, and hold the output of a command that has died.
    """
    server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    for owner, name in ((server, "_forkserver_alive_fd"), (tracker, "_fd")):
        if getattr(owner, name) is not None:
            os.close(getattr(owner, name))
            setattr(owner, name, None)
