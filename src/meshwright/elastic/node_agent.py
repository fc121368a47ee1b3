"""The agent of a node that is not the supervisor's: ``meshwright agent``.

It joins the run over TCP and starts a local agent, which starts and watches the ranks as on one machine. This
process is that agent's supervisor: it passes on commands and reports, sets the paths and the network
interface of this node, and reports the flight recorders. If this process dies, the local agent kills its
ranks.

When the connection is lost, the ranks go on for ``orphan_s`` seconds, in which this process dials the same
address again. A new supervisor adopts the ranks; one that has given up this node gets a new local agent.
Otherwise the ranks save a checkpoint and stop.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from meshwright.core.errors import MeshwrightError, Problem, RunFailedError, UserError
from meshwright.core.flight_ring import FlightMemory
from meshwright.core.version import __version__
from meshwright.elastic.rank_watch import NodeWatch
from meshwright.launch.channel import Channel, Message
from meshwright.launch.environment import NODE_VARIABLE, caller_environment, is_of_caller
from meshwright.launch.join import local_address
from meshwright.launch.local import LocalAgent
from meshwright.launch.network import find_interface
from meshwright.launch.remote_nodes import SPARE
from meshwright.launch.session import Session

REDIAL_S = 1.0
"""Between two attempts to reach the supervisor again."""
STOP_GRACE_S = 30.0
"""How long ranks without a supervisor have to save and stop."""
MOST_UNSENT = 100_000
"""Reports that are kept for a new supervisor."""


SENT_AGAIN = ("event", "failed", "fenced")
"""Reports that a new supervisor gets, if the one before may not have handled them."""

Result = TypeVar("Result")


class NodeSetup(Protocol):
    """Callbacks of a node: prepare its run folder, update it for another layout, show a message."""

    def prepare(self, command: Message) -> tuple[Path, Sequence[Problem]]:
        """Write the run folder of this node and check what it must reach."""

    def update(self, files: Mapping[str, str]) -> None:
        """Write plan and assignment of another layout into the run folder of this node."""

    def notify(self, text: str) -> None:
        """Show a line to the user."""


@dataclass
class NodeAgent:
    """Connects the supervisor with the local agent of this node."""

    dial: Callable[[], Channel]
    """Tries once to join the run again."""
    start_agent: Callable[[], LocalAgent]
    setup: NodeSetup
    torch: str
    """Version of torch on this node."""
    stops: list[int] = field(default_factory=list)
    """Signals that were caught."""

    def __post_init__(self) -> None:
        self._supervisor: Channel | None = None
        self._agent: LocalAgent | None = None
        self._run_dir = Path()
        self._run, self._node = "", SPARE
        self._is_spare = False
        self._hello: Message | None = None
        """The first message of the local agent of a spare."""
        self._session: Session | None = None
        """The session of the node that this agent has."""
        self._dialed_again = False
        """Whether the supervisor has yet to say how this agent goes on; nothing is sent until then."""
        self._ranks: set[int] = set()
        """Ranks with a process."""
        self._generation = 0
        self._orphan_s = 0.0
        self._deadline = math.inf
        """When ranks without a supervisor are told to stop; then, when they are killed."""
        self._stopping = False
        self._next_dial = 0.0
        self._stops_sent = 0
        self._unsent: deque[Message] = deque(maxlen=MOST_UNSENT)
        self._exits: dict[int, Message] = {}
        """The exits of ranks that have no new process yet; a supervisor may have died before it read them."""
        self._watch = NodeWatch()
        self._selector = selectors.DefaultSelector()
        self._outcome: bool | None = None
        """Whether the run succeeded, when it is over."""

    def run(self, supervisor: Channel) -> bool:
        """Take part in a run to its end; returns whether it succeeded.

        Args:
            supervisor: The connection that has joined.

        Raises:
            RunFailedError: The supervisor or the local agent is gone.
            UserError: The supervisor refused this node.
        """
        self._attach(supervisor)
        try:
            while self._outcome is None:
                self._serve()
        finally:
            self._end_agent()
            self._watch.close()
            if self._supervisor is not None:
                self._supervisor.close()
            self._selector.close()
        return self._outcome

    def _attach(self, supervisor: Channel) -> None:
        self._supervisor, self._deadline, self._dialed_again = supervisor, math.inf, False
        supervisor.setblocking(False)
        self._selector.register(supervisor, selectors.EVENT_READ, "supervisor")
        self._send(
            {
                "is": "join",
                "host": socket.gethostname(),
                "meshwright": __version__,
                "torch": self.torch,
                "run": self._run,
                "node": self._node,
                "session": None if self._session is None else self._session.name,
                "received": 0 if self._session is None else self._session.received,
            }
        )
        self._dialed_again = self._session is not None

    def _serve(self) -> None:
        """Handle what has happened."""
        timeout_s = min(self._watch.next_report_s, max(0.0, self._deadline - time.monotonic()))
        for key, _ in self._selector.select(timeout_s):
            if key.data == "agent":
                self._read_agent()
            elif self._supervisor is not None:
                self._read_supervisor(self._supervisor)
        self._report_if_due()
        self._flush()
        if len(self.stops) > self._stops_sent:
            self._stop()
        if self._supervisor is None:
            self._redial_or_stop()

    def _report_if_due(self) -> None:
        """Report the ranks; also without ranks, as a sign of life for the supervisor."""
        if self._watch.next_report_s == 0:
            received = 0 if self._session is None else self._session.received
            self._send(self._watch.report() | {"received": received})

    def _run_while_reporting(self, work: Callable[[], Result]) -> Result:
        """Run a call that may block for long in a thread, and keep sending reports."""
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(work)
            while not wait([running], self._watch.next_report_s).done:
                self._report_if_due()
        return running.result()

    def _stop(self) -> None:
        """The first signal: SIGTERM takes this node out of the run, others stop the run. The second: end.

        A scheduler sends SIGTERM to a node that it takes away. A spare leaves at once.
        """
        self._stops_sent = len(self.stops)
        if self._stops_sent > 1 or self._agent is None or (self._supervisor is None and not self._ranks):
            self._outcome = False
        elif self._supervisor is None:
            self.setup.notify("there is no supervisor: the ranks of this node save and stop")
            self._deadline = time.monotonic()
        else:
            self._ask_to_stop()

    def _ask_to_stop(self) -> None:
        """Tell the supervisor of a signal that this node has received."""
        if self._is_spare:
            self._send({"is": "leave"})
            self._flush()
            self.setup.notify("this spare node leaves the run")
            self._outcome = True
        elif self.stops[0] == signal.SIGTERM:
            self.setup.notify("this node leaves the run after this step; another signal ends it at once")
            self._send({"is": "leave"})
        else:
            again = "press Ctrl-C again to end this node at once"
            self.setup.notify(f"asked the run to stop after this step; {again}")
            self._send({"is": "stop"})

    def _read_supervisor(self, supervisor: Channel) -> None:
        try:
            messages = supervisor.receive()
        except EOFError:
            self._lose_supervisor()
            return
        for message in messages:
            if self._session is not None:
                self._session.count([message])
            self._dialed_again = False
            handle = getattr(self, f"_do_{message['do']}", None)
            if handle is not None:
                handle(message)
            elif self._agent is not None:
                self._agent.send(message)
            if self._supervisor is None or self._outcome is not None:
                return

    def _do_prepare(self, message: Message) -> None:
        """Join as a node: write the run folder, check what must be reached, start a local agent."""
        if not self._is_spare:
            self._end_agent(goes_on=True)
        self._is_spare, self._session = False, Session(message["session"])
        self._run, self._node, self._orphan_s = message["run"], message["node"], message["orphan_s"]
        self._run_dir, problems = self._run_while_reporting(lambda: self.setup.prepare(message))
        self._send({"is": "prepared", "problems": [problem.as_dict() for problem in problems]})
        if problems:
            raise UserError(*problems)
        self.setup.notify(f"joined {message['name']} as node {self._node}; run folder: {self._run_dir}")
        if self._agent is None:
            self._start_agent()
        elif self._hello is not None:
            self._send(self._hello)
        if self._stops_sent:
            self._ask_to_stop()  # the previous supervisor may not have handled it

    def _start_agent(self) -> None:
        self._agent, self._hello = self._run_while_reporting(self.start_agent), None
        self._selector.register(self._agent, selectors.EVENT_READ, "agent")

    def _do_wait_as_spare(self, message: Message) -> None:
        """All nodes of the run have an agent. Ranks that this one had were replaced."""
        self._end_agent(goes_on=True)
        self._run, self._node, self._orphan_s = message["run"], SPARE, message["orphan_s"]
        self._is_spare, self._session = True, None
        self._start_agent()  # so that it is warm when a node is lost
        self.setup.notify("all nodes of the run have an agent: this one waits as a spare node")

    def _do_adopt(self, message: Message) -> None:
        """A new supervisor takes over the ranks; it also gets what it has missed."""
        missed = self._list_missed()
        self._unsent.clear()
        self._session = Session(message["session"])
        ranks, generation = sorted(self._ranks), self._generation
        self._send({"is": "adopted", "generation": generation, "ranks": ranks, "store_dir": ""})
        for rank in ranks:
            self._send({"is": "recorder", "rank": rank})
        for one in (*self._exits.values(), *missed):
            self._send(one)
        self.setup.notify("a new supervisor has adopted the ranks")
        if self._stops_sent:
            self._ask_to_stop()  # the previous supervisor may not have handled it

    def _list_missed(self) -> list[Message]:
        """Messages that the previous supervisor may not have handled when it died."""
        unsent = {id(message) for message in self._unsent}
        known = self._ranks | self._exits.keys()  # of this layout
        in_flight = [
            {**message, "again": True}
            for message in (() if self._session is None else self._session.unacknowledged)
            if message["is"] in SENT_AGAIN and message["rank"] in known and id(message) not in unsent
        ]
        return [*in_flight, *self._unsent]

    def _do_resume(self, message: Message) -> None:
        """The connection broke, and the same supervisor goes on: send what it has missed."""
        assert self._session is not None, "it is resumed by its name"
        self._unsent.clear()
        for one in self._session.missed(message["received"]) or ():
            self._queue(one)
        self.setup.notify("connected to the supervisor again")

    def _do_ack(self, message: Message) -> None:
        if self._session is not None:
            self._session.acknowledge(message["received"])

    def _do_configure(self, message: Message) -> None:
        """For the agent of node 0 only: this process waits for a new supervisor itself."""

    def _do_refuse(self, message: Message) -> None:
        rule, fix = f"refused this node: {message['reason']}", "Check the command of the run"
        raise UserError(Problem("node-refused", rule, "the supervisor", fix=fix))

    def _do_end(self, message: Message) -> None:
        if message["left"]:
            self.setup.notify("this node has left the run, which goes on without it")
        self._outcome = bool(message["ok"])

    def _do_start(self, message: Message) -> None:
        self._ranks.add(message["rank"])
        self._exits.pop(message["rank"], None)
        self._generation = max(self._generation, message["command"]["generation"])
        message["environment"][NODE_VARIABLE] = str(self._node)  # where it is, whatever was planned
        self._pass_on(message)

    def _do_begin_layout(self, message: Message) -> None:
        """The run goes on in another layout."""
        if self._agent is None:
            return
        self.setup.update(message.pop("files"))
        self._watch.close()
        self._ranks, self._exits = set(), {}
        self._unsent.clear()
        self._agent.send(message)

    def _do_keep_spares(self, message: Message) -> None:
        self._pass_on(message)

    def _do_command(self, message: Message) -> None:
        self._generation = max(self._generation, message["command"]["generation"])
        if self._agent is not None:
            self._agent.send(message)

    def _pass_on(self, message: Message) -> None:
        """Pass on a command to start processes, with the paths and the environment of this node."""
        assert self._agent is not None, "a node starts ranks after it has joined"
        assert self._supervisor is not None, "it sent the command"
        given = {name: value for name, value in message["environment"].items() if not is_of_caller(name)}
        environment = given | caller_environment()
        interface = find_interface(local_address(self._supervisor.socket))
        chosen = os.environ.get("GLOO_SOCKET_IFNAME", interface)
        environment |= {} if chosen is None else {"GLOO_SOCKET_IFNAME": chosen}
        log = str(self._run_dir / "logs" / Path(message["log"]).name)
        self._agent.send({**message, "run_dir": str(self._run_dir), "log": log, "environment": environment})

    def _read_agent(self) -> None:
        assert self._agent is not None, "it is read only while it is there"
        try:
            messages = self._agent.receive()
        except EOFError:
            rule = "the process that starts the ranks of this node has ended"
            fix = f"See {self._run_dir / 'logs'}; run the command again to join as a new node"
            raise RunFailedError(Problem("node-agent-died", rule, fix=fix)) from None
        for message in messages:
            if message["is"] == "hello" and self._is_spare:
                self._hello = message
                self._send({"is": "spare_ready"})
                continue
            if message["is"] == "recorder":
                with contextlib.suppress(OSError, ValueError):
                    self._watch.add(message["rank"], FlightMemory.open(message.pop("path")))
            elif message["is"] in ("failed", "exited"):
                self._send(self._watch.report(whole=[message["rank"]]))
                if message["is"] == "exited":
                    self._ranks.discard(message["rank"])
                    self._exits[message["rank"]] = message
            self._send(message)
            is_held = self._supervisor is None or self._dialed_again
            if is_held and message["is"] not in ("request", "hello", "recorder", "exited"):
                self._unsent.append(message)

    def _send(self, message: Message) -> None:
        if self._session is not None:
            self._session.keep(message)
        self._queue(message)

    def _queue(self, message: Message) -> None:
        if self._supervisor is not None and not self._dialed_again:
            try:
                self._supervisor.queue(message)
            except OSError:
                self._lose_supervisor()

    def _flush(self) -> None:
        if self._supervisor is None:
            return
        try:
            self._supervisor.flush()
        except OSError:
            self._lose_supervisor()
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._supervisor.has_output else 0)
        self._selector.modify(self._supervisor, events, "supervisor")

    def _lose_supervisor(self) -> None:
        """The connection is lost. An agent that has not joined yet ends."""
        assert self._supervisor is not None, "it is lost once"
        self._selector.unregister(self._supervisor)
        self._supervisor.close()
        self._supervisor = None
        if not self._has_joined or self._orphan_s == 0:
            raise self._describe_loss()
        self._deadline, self._next_dial = time.monotonic() + self._orphan_s, 0.0
        what = "this spare node waits" if self._is_spare else "its ranks go on"
        self.setup.notify(f"lost the supervisor; {what} for {self._orphan_s:.0f} s")

    @property
    def _has_joined(self) -> bool:
        """Whether this node has ranks, or may get some: it is idle in this layout, or a spare."""
        return bool(self._ranks) or self._is_spare or self._agent is not None

    def _redial_or_stop(self) -> None:
        """Dial the supervisor again; after ``orphan_s`` stop the ranks with a checkpoint."""
        now = time.monotonic()
        if not self._has_joined or (self._stopping and (not self._ranks or now >= self._deadline)):
            raise self._describe_loss()
        if now >= self._deadline:
            self._stopping, self._deadline = True, now + STOP_GRACE_S
            for rank in self._ranks:
                if self._agent is not None:
                    self._agent.send({"do": "signal", "rank": rank, "number": int(signal.SIGTERM)})
        elif not self._stopping and now >= self._next_dial:
            self._next_dial = now + REDIAL_S
            with contextlib.suppress(MeshwrightError):
                self._attach(self.dial())

    def _describe_loss(self) -> RunFailedError:
        rule = "the connection to the supervisor is lost"
        fix = "Resume the run there, and run this command again"
        return RunFailedError(Problem("node-supervisor-lost", rule, fix=fix))

    def _end_agent(self, goes_on: bool = False) -> None:
        """End the local agent and its ranks.

        Args:
            goes_on: Whether this node stays in the run and keeps sending reports.
        """
        if self._agent is not None:
            self._selector.unregister(self._agent)
            if goes_on:
                self._run_while_reporting(self._agent.close)
            else:
                self._agent.close()
            self._agent, self._ranks, self._exits = None, set(), {}
            self._watch.close()
