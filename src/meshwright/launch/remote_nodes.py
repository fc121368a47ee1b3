"""The nodes of a run besides the supervisor's: accepts their agents and lets each prepare its run folder.

An agent that has proved the token is assigned a node, gets the files that its ranks need, and checks that it
reaches the data and the checkpoints. It counts as joined when it reports no problem. An agent that comes when
all nodes have one is a spare: it waits, and gets the next node that is lost. An agent that falls silent while
it waits or prepares is forgotten, and the next spare gets its node.
"""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable
from dataclasses import dataclass, field

from meshwright.core.version import __version__
from meshwright.launch.channel import Channel, Message
from meshwright.launch.join import JoinListener, local_address
from meshwright.launch.network import find_interface
from meshwright.launch.session import Session
from meshwright.launch.silence import SilenceWatch

SPARE = -1
"""The node of an agent that has none."""
END_S = 15.0
"""How long an agent has to end its ranks at the end of the run."""


class RemoteAgent:
    """The supervisor's connection to the agent of another node. Sending never blocks."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.host = ""
        self.session = Session()
        self.broken = False
        """Whether the connection is lost, and the agent may dial again."""

    def fileno(self) -> int:
        """For ``selectors``."""
        return self._channel.fileno()

    @property
    def interface(self) -> str | None:
        """The network interface of this machine over which the agent is connected."""
        return find_interface(local_address(self._channel.socket))

    @property
    def events(self) -> int:
        """Events to wait for with ``selectors``."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._channel.has_output else 0)

    def send(self, message: Message) -> None:
        """Queue a message; an agent that is gone is noticed by ``receive``."""
        self.session.keep(message)
        if not self.broken:
            with contextlib.suppress(OSError):
                self._channel.queue(message)

    def receive(self) -> list[Message]:
        """The messages that have arrived; also sends what is queued.

        Raises:
            EOFError: The agent is gone.
        """
        with contextlib.suppress(OSError):
            self._channel.flush()
        messages = self._channel.receive()
        handled = self.session.received  # by the caller; these messages are not, yet
        self.session.count(messages)
        for message in messages:
            if message.get("is") == "watch":
                self.session.acknowledge(int(message.get("received", 0)))
                self.send({"do": "ack", "received": handled})
        return messages

    def disconnect(self) -> None:
        """Close a connection that is lost. Messages are kept until the agent has dialed again."""
        self.broken = True
        self._channel.close()

    def resume(self, other: RemoteAgent, received: int) -> bool:
        """Go on over the connection of another object; returns False if messages are lost.

        Args:
            other: The agent, as it has dialed again.
            received: Messages that it has.
        """
        missed = self.session.missed(received)
        if missed is None:
            return False
        self._channel, self.broken = other._channel, False
        with contextlib.suppress(OSError):
            for message in ({"do": "resume", "received": self.session.received}, *missed):
                self._channel.queue(message)
        return True

    def end(self, ok: bool, left: bool = False) -> None:
        """Tell the agent that the run is over, or that its node has left the run."""
        self.send({"do": "end", "ok": ok, "left": left})

    def close(self) -> None:
        """Wait until the agent has ended its ranks, for a limited time, and close the connection."""
        if self.broken:
            return
        connection = self._channel.socket
        with contextlib.suppress(OSError, EOFError):
            connection.settimeout(END_S)
            self._channel.flush()
            while True:  # until it closes its end
                self._channel.receive()
        self._channel.close()

    def drop(self) -> None:
        """Close the connection at once."""
        self._channel.close()


@dataclass(frozen=True)
class Joined:
    """An agent that has joined."""

    node: int
    agent: RemoteAgent
    messages: list[Message]
    """Messages that came with its request to join."""
    received: int | None = None
    """Messages that it has from its connection before; None if it is a new one."""


@dataclass
class RemoteNodes:
    """Accepts the agents of nodes 1, 2, ..."""

    listener: JoinListener
    count: int
    """Nodes of the run, with node 0."""
    run: str
    """Identity of the run: an agent that was part of it before has the same one."""
    describe: Callable[[int], Message]
    """The command to prepare a node: files, and what to check."""
    adopting: bool = False
    """Whether agents whose ranks still train are taken over with them."""
    torch: str = ""
    """Version on this machine; other nodes must have the same."""
    orphan_s: float = 0.0
    """How long a spare waits for a new supervisor."""
    sessions: dict[int, str] = field(default_factory=dict)
    """The session of each node that has an agent: one whose connection broke dials again with it."""
    _joining: dict[int, RemoteAgent] = field(default_factory=dict)
    """Agents that have proved the token, by file descriptor."""
    _nodes: dict[int, int] = field(default_factory=dict)
    """The node of each agent that prepares it."""
    _spares: list[int] = field(default_factory=list)
    """Agents that wait for a node, the longest first."""
    _ready_spares: set[int] = field(default_factory=set)
    """Spares, also while they prepare a node, that have a warm local agent."""
    silence: SilenceWatch = field(default_factory=SilenceWatch)
    """Silence of agents that wait or prepare, by file descriptor."""
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def __post_init__(self) -> None:
        self._selector.register(self.listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """For ``selectors``."""
        return self._selector.fileno()  # type: ignore[attr-defined, no-any-return]  # epoll and kqueue have it

    def poll(self, present: frozenset[int]) -> tuple[list[Joined], list[Message]]:
        """Go on with all agents that join, without blocking.

        Args:
            present: Nodes that have an agent.

        Returns:
            Agents that have joined; and what to report.
        """
        joined: list[Joined] = []
        reports: list[Message] = []
        for channel in self.listener.accept():
            agent = RemoteAgent(channel)
            self._joining[agent.fileno()] = agent
            self._selector.register(agent, selectors.EVENT_READ)
            self.silence.note_message(agent.fileno())
        for key, _ in self._selector.select(0):
            if key.fd in self._joining:
                self._go_on(key.fd, present, joined, reports)
                present |= {one.node for one in joined}
        for fd in self.silence.poll():  # after the messages: this process may have been busy
            self._lose(fd, f"it sent nothing for {self.silence.limit_s:g} s", reports)
        while self._spares and not self.adopting and (free := self._list_free(present)):
            self._prepare(self._spares.pop(0), free[0])
        return joined, reports

    @property
    def spares(self) -> int:
        """Agents that can take over a node."""
        return sum(fd in self._ready_spares for fd in self._spares)

    def _lose(self, fd: int, reason: str, reports: list[Message]) -> None:
        """Forget an agent that is gone; the next spare gets the node that it prepared."""
        agent = self._joining[fd]
        if fd in self._ready_spares:
            reports.append({"is": "spare_lost", "node": SPARE, "host": agent.host, "reason": reason})
        self._forget(fd)
        agent.drop()

    def _list_free(self, present: frozenset[int]) -> list[int]:
        """Nodes without an agent."""
        taken = {*present, *self._nodes.values()}
        return [node for node in range(1, self.count) if node not in taken]

    def _prepare(self, fd: int, node: int) -> None:
        self._nodes[fd] = node
        agent = self._joining[fd]
        command = {"do": "adopt"} if self.adopting else self.describe(node)
        agent.send({**command, "session": agent.session.name})

    def _go_on(self, fd: int, present: frozenset[int], joined: list[Joined], reports: list[Message]) -> None:
        """Go on with one agent."""
        agent = self._joining[fd]
        try:
            messages = agent.receive()
        except EOFError:
            self._lose(fd, "its connection is closed", reports)
            return
        if messages:
            self.silence.note_message(fd)
        while messages and fd in self._joining:
            message = messages.pop(0)
            if message.get("is") == "join":
                if self._is_known(message):
                    self._forget(fd)
                    received = int(message.get("received", 0))
                    joined.append(Joined(message["node"], agent, messages, received))
                    return
                self._assign(fd, message, present, reports)
            elif message.get("is") == "leave":
                self._lose(fd, "it was told to leave", reports)
            elif message.get("is") == "spare_ready" and fd in self._spares:
                self._ready_spares.add(fd)
                reports.append({"is": "node_spare", "node": SPARE, "host": agent.host})
            elif message.get("is") in ("prepared", "adopted") and fd in self._nodes:
                node = self._nodes[fd]
                if problems := message.get("problems"):
                    reports.append({"is": "node_refused", "node": node, "problems": problems})
                    self._refuse(fd, "this node cannot take part in the run")
                else:
                    self._forget(fd)
                    first = [message] if message["is"] == "adopted" else []
                    joined.append(Joined(node, agent, [*first, *messages]))

    def _is_known(self, message: Message) -> bool:
        """Whether an agent that has a node dials again."""
        session = message.get("session")
        return message.get("run") == self.run and self.sessions.get(message["node"]) == session is not None

    def _assign(self, fd: int, message: Message, present: frozenset[int], reports: list[Message]) -> None:
        """Assign a node to an agent, keep it as a spare, or refuse it."""
        agent = self._joining[fd]
        agent.host = str(message.get("host", ""))[:100]
        versions = [("meshwright", __version__), ("torch", self.torch)]
        for name, here in versions:
            if message.get(name) != here:
                self._refuse(fd, f"{name} {message.get(name)} there, {here} at the supervisor")
                return
        free = self._list_free(present)
        known = message.get("run") == self.run and message.get("node") in free
        if self.adopting and not known and message.get("node") != SPARE:
            self._refuse(fd, "the supervisor takes over the ranks of another run")
        elif not free or (self.adopting and not known):
            self._spares.append(fd)
            agent.send({"do": "wait_as_spare", "run": self.run, "orphan_s": self.orphan_s})
        else:
            self._prepare(fd, message["node"] if known else free[0])

    def _refuse(self, fd: int, reason: str) -> None:
        agent = self._joining[fd]
        agent.send({"do": "refuse", "reason": reason})
        self._forget(fd)
        agent.drop()

    def _forget(self, fd: int) -> None:
        self._selector.unregister(fd)
        del self._joining[fd]
        self._nodes.pop(fd, None)
        self._ready_spares.discard(fd)
        self.silence.forget(fd)
        if fd in self._spares:
            self._spares.remove(fd)

    def close(self, ok: bool = True) -> None:
        """Stop listening; spares are told whether the run succeeded."""
        for fd, agent in list(self._joining.items()):
            if fd in self._spares:
                agent.end(ok)
            self._forget(fd)
            agent.drop()
        self._selector.close()
        self.listener.close()


def name_node(node: int, host: str) -> str:
    """``node 1 (worker-b)``."""
    return f"node {node} ({host})" if host else f"node {node}"
