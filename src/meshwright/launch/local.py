"""The local launcher: starts the ranks of one machine, receives their events, and stops all of them.

The rendezvous store is in this process, on a loopback socket (torch's own would listen on all addresses).
Every attempt has its own key prefix. Ranks are forked from a fork server that has imported torch once. Each
rank sends its events through a pipe, so that the launcher knows the last event of every rank even if the
disk is full. A rank exits when the launcher is gone.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver, resource_tracker, util
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from meshwright.core.errors import Problem, RunFailedError
from meshwright.core.events import Event, to_json, warn
from meshwright.launch.environment import GENERATION_VARIABLE, STORE_VARIABLE, loopback_interface
from meshwright.launch.exits import EXIT_OK, EXIT_PEER_LOST

LOGS = "logs"
SIGNAL_HINTS = {
    signal.SIGILL: "A kernel used an instruction that this machine advertises but does not have (AMX on "
    "virtual machines): set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, or train.precision=fp32. ",
}
"""Hints for signals with a known cause."""
CALLER_VARIABLES = ("HOME", "XDG_CACHE_HOME")
"""Passed to the ranks explicitly: the environment of the fork server is fixed when it starts."""
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a terminal or a scheduler sends to the whole process group."""


@dataclass
class _Rank:
    """The launcher's view of a rank."""

    rank: int
    process: Any
    events: connection.Connection | None
    last_event: Event = field(default_factory=dict)
    error: Event | None = None
    died_at: float = 0.0
    """Time of its error event, or when its exit was noticed."""

    @property
    def alive(self) -> bool:
        return bool(self.process.is_alive())


@dataclass
class LocalLaunch:
    """A launch of all ranks on this machine."""

    entry: str
    """``module:function``, called as ``function(run_dir, listener)`` in each rank."""
    run_dir: Path
    world_size: int
    generation: int
    stop_grace_s: float
    listener: Callable[[Event], None]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment of every rank, besides torchrun's variables."""
    preload: Sequence[str] = ()
    """Modules that the fork server imports."""
    saved: bool = False
    """Whether there was an event of a checkpoint."""

    def run(self) -> bool:
        """Run to the end; returns whether a signal stopped it.

        Raises:
            RunFailedError: With the failed rank, its exit status and its last event.
        """
        (self.run_dir / LOGS).mkdir(exist_ok=True)
        context = multiprocessing.get_context("forkserver")
        ranks: list[_Rank] = []
        with contextlib.ExitStack() as stack:
            stop = stack.enter_context(_caught_signals())
            stack.callback(_end_all, ranks)
            start_server(self.preload)
            store = stack.enter_context(_listening_socket()) if self.world_size > 1 else None
            for rank in range(self.world_size):
                ranks.append(self._start(context, rank, store))  # noqa: PERF401  (one that fails leaves the others)
            keep = _serve_store(store) if store is not None else None
            failed = self._watch(ranks, stop)
            del keep
        if failed is not None and not stop:
            raise RunFailedError(self._report_failure(failed))
        return bool(stop)

    def _start(self, context: Any, rank: int, store: socket.socket | None) -> _Rank:
        receiver, sender = context.Pipe(duplex=False)
        environment = {
            **{name: os.environ[name] for name in CALLER_VARIABLES if name in os.environ},
            **self.environment,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            GENERATION_VARIABLE: str(self.generation),
        }
        if store is not None:
            environment[STORE_VARIABLE] = f"127.0.0.1:{store.getsockname()[1]}"
            environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", loopback_interface())
        log = self.run_dir / LOGS / f"rank-{rank}.log"
        arguments = (self.entry, str(self.run_dir), environment, str(log), sender)
        process = context.Process(target=_enter_rank, args=arguments, name=f"rank-{rank}", daemon=False)
        with _without_main():
            process.start()
        sender.close()
        return _Rank(rank, process, receiver)

    def _watch(self, ranks: list[_Rank], stop: list[int]) -> _Rank | None:
        """Forward events and signals until all ranks have exited, or the grace period is over."""
        deadline = float("inf")
        stops_sent = 0
        dead: list[_Rank] = []
        while any(r.alive for r in ranks) and time.monotonic() < deadline:
            waiting: list[Any] = [r.events for r in ranks if r.events]
            waiting += [r.process.sentinel for r in ranks if r.alive]
            connection.wait(waiting, timeout=0.5)
            self._poll(ranks, dead)
            if dead and deadline == float("inf"):
                deadline = time.monotonic() + self.stop_grace_s
            if len(stop) > stops_sent:
                stops_sent = len(stop)
                self._forward(ranks, stops_sent)
        self._poll(ranks, dead)
        # The first failure is the likely cause; ranks that fail because of it exit with EXIT_PEER_LOST.
        return min(dead, key=lambda r: (r.process.exitcode == EXIT_PEER_LOST, r.died_at), default=None)

    def _poll(self, ranks: list[_Rank], dead: list[_Rank]) -> None:
        """Read all events, and add ranks that have failed since the last poll."""
        for rank in ranks:
            gone = not rank.alive  # checked first, so that all its events are in the pipe
            self._drain(rank)
            if gone and rank.process.exitcode != EXIT_OK and rank not in dead:
                rank.died_at = rank.error["time"] if rank.error else time.time()
                dead.append(rank)

    def _forward(self, ranks: list[_Rank], stops_sent: int) -> None:
        """First signal: the ranks stop after their step. Second: they are killed."""
        for rank in ranks:
            if rank.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, signal.SIGTERM if stops_sent == 1 else signal.SIGKILL)
        if stops_sent == 1:
            self._notify({"event": "stopping", "rank": 0})

    def _notify(self, event: Event) -> None:
        """Call the listener; its errors must not end a run."""
        try:
            self.listener(event)
        except Exception as error:
            warn(f"an event could not be shown ({error!r}): {event}")

    def _drain(self, rank: _Rank) -> None:
        while rank.events is not None and rank.events.poll():
            try:
                event = json.loads(rank.events.recv_bytes())
            except (EOFError, OSError):
                rank.events.close()
                rank.events = None
                return
            rank.last_event = event
            if event["event"] == "error":
                rank.error = event
            self.saved |= event["event"] in ("checkpoint", "resumed")
            self._notify(event)

    def _report_failure(self, rank: _Rank) -> Problem:
        status = rank.process.exitcode
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        last = rank.last_event
        if rank.error is not None:
            problems = rank.error.get("problems") or []
            if problems:
                return Problem.from_dict(problems[0])
            how += f": {rank.error['kind']}: {rank.error['message'].splitlines()[0]}"
        step = f" of step {last['step']}" if "step" in last else ""
        age = f", {time.time() - last['time']:.1f} s ago" if last else ""
        seen = f"its last event was {last['event']!r}{step}{age}" if last else "it sent no event"
        log = self.run_dir / LOGS / f"rank-{rank.rank}.log"
        next_step = "resume the run to continue from the last checkpoint"
        if not self.saved:
            next_step = "there is no checkpoint yet; set checkpoint.every_steps to save them"
        return Problem(
            "run-rank-died",
            f"rank {rank.rank} of {self.world_size} on {socket.gethostname()} died ({how}); {seen}",
            fix=f"{SIGNAL_HINTS.get(-status, '')}Its output is in {log}; {next_step}",
        )


def _enter_rank(
    entry: str, run_dir: str, environment: dict[str, str], log: str, sender: connection.Connection
) -> None:
    """Entry of a child process: environment, output, link to the parent; then the rank itself."""
    gc.freeze()
    gc.enable()  # disabled by launch.forkserver_preload
    os.environ.update(environment)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the launcher handles these two
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until the rank can stop cleanly
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)
    with contextlib.suppress(OSError):
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    module, _, function = entry.partition(":")

    def send(event: Event) -> None:
        with contextlib.suppress(OSError):
            sender.send_bytes(to_json(event).encode())

    status = getattr(importlib.import_module(module), function)(run_dir, send)
    sender.close()
    util._exit_function()  # type: ignore[attr-defined]  # the cleanup of a child: frees named semaphores
    os._exit(status)  # skips destructors that could wait for lost ranks


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is a child of the launcher"
    connection.wait([parent.sentinel])
    os._exit(EXIT_PEER_LOST)


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


@contextlib.contextmanager
def _listening_socket() -> Iterator[socket.socket]:
    """A loopback socket: ranks can connect before the store serves them."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        yield listener


def _serve_store(listener: socket.socket) -> object:
    """Start torch's TCPStore on the socket; it lives as long as the returned object."""
    import torch.distributed as dist  # noqa: PLC0415  (launch needs torch for this alone)

    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
    )


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


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP; the watch loop acts on them."""
    caught: list[int] = []

    def catch(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP or not caught:  # a closing terminal may send it twice
            caught.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, catch) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_all(ranks: Sequence[_Rank]) -> None:
    """Kill and join all ranks."""
    for rank in ranks:
        if rank.alive:
            rank.process.kill()
    for rank in ranks:
        rank.process.join()
        if rank.events is not None:
            rank.events.close()
