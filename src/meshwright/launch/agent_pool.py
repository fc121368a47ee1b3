"""The agents of a run, one per node, and which of them has which rank.

A placement says which node has which rank. Node 0 is the machine of the supervisor. An agent may have no
rank: the layout needs fewer devices, or its node came back after the run had gone on without it.
"""

from __future__ import annotations

import math
import selectors
import time
from typing import Protocol

from meshwright.launch.channel import Message
from meshwright.launch.environment import caller_environment, loopback_interface
from meshwright.launch.placement import Placement
from meshwright.launch.remote_nodes import RemoteAgent, RemoteNodes, name_node
from meshwright.launch.session import RECONNECT_S
from meshwright.launch.silence import SilenceWatch


class AgentConnection(Protocol):
    """The supervisor's connection to the agent of one node."""

    def fileno(self) -> int:
        """For ``selectors``."""

    def send(self, message: Message) -> None:
        """Send a message; an agent that is gone is noticed by ``receive``."""

    def receive(self) -> list[Message]:
        """The messages that have arrived; raises ``EOFError`` if the agent is gone."""

    def close(self) -> None:
        """End the agent and its ranks, and wait for it."""


class AgentPool:
    """Sends messages to the agents of ranks, and collects what the agents report."""

    def __init__(
        self, local: AgentConnection, placement: Placement, remote: RemoteNodes | None = None
    ) -> None:
        """Begin with the agent of this machine.

        Args:
            local: Of node 0.
            placement: Placement of the ranks.
            remote: Accepts the agents of the other nodes; None if there are none.
        """
        self.placement, self.remote = placement, remote
        self._agents: dict[int, AgentConnection] = {}
        self._hosts: dict[int, str] = {}
        self._selector = selectors.DefaultSelector()
        if remote is not None:
            self._selector.register(remote, selectors.EVENT_READ)
        self._interface: str | None = None
        self._silence = SilenceWatch()
        self._broken: dict[int, float] = {}
        """When nodes whose connection broke are lost."""
        self._may_redial = False
        self._released: list[RemoteAgent] = []
        """Agents that were told to end: their nodes have left the run."""
        self.add(0, local)

    @property
    def nodes(self) -> frozenset[int]:
        """Nodes whose agent is connected."""
        return frozenset(self._agents)

    @property
    def count(self) -> int:
        """Nodes of the run."""
        return 1 if self.remote is None else self.remote.count

    @property
    def refused(self) -> int:
        """Connections that did not prove the token."""
        return 0 if self.remote is None else self.remote.listener.refused

    @property
    def interface(self) -> str:
        """The network interface of this machine for traffic between ranks."""
        return self._interface or loopback_interface()

    def node_of(self, rank: int) -> int:
        """The node that a rank is assigned to."""
        return self.placement.devices[rank].node

    def host(self, node: int) -> str:
        """The host of another node."""
        return self._hosts.get(node, "")

    def name(self, node: int) -> str:
        """A node with its host, for messages."""
        return name_node(node, self._hosts.get(node, ""))

    def send(self, rank: int, message: Message) -> None:
        """Send a message to the agent of a rank, if it is connected."""
        self.send_to_node(self.node_of(rank), message)

    def send_to_node(self, node: int, message: Message) -> None:
        """Send a message to the agent of a node, if it is connected.

        Ranks of this node get its own variables. Those of other nodes get theirs from their agents: paths
        differ, and credentials must not be sent.
        """
        if node == 0 and "environment" in message:
            message = {**message, "environment": {**caller_environment(), **message["environment"]}}
        if (agent := self._agents.get(node)) is not None:
            agent.send(message)
            self._update_events(node)

    def broadcast(self, message: Message) -> None:
        """Send a message to all agents."""
        for node in self._agents:
            self.send_to_node(node, message)

    def wait(self, timeout_s: float) -> list[Message]:
        """Messages of the agents within a time, each with its ``node``.

        The pool adds ``node_joined``, ``node_refused`` or ``node_spare`` for an agent that joins,
        ``spare_lost`` for a spare and ``agent_lost`` for the agent of a node that is gone or silent.
        """
        messages: list[Message] = []
        until = min(self._broken.values(), default=math.inf) - time.monotonic()
        for key, _ in self._selector.select(max(0.0, min(timeout_s, until))):
            if isinstance(key.data, RemoteAgent):
                self._read_released(key.data)
            elif key.data is not None:
                messages += self._receive(key.data)
        if self.remote is not None:  # before the lost ones: an agent may have dialed again meanwhile
            messages += self._poll_remote(self.remote)
        late = [node for node, deadline in self._broken.items() if time.monotonic() >= deadline]
        messages += [self._lose(node) for node in (*self._silence.poll(), *late)]
        return messages

    def _poll_remote(self, remote: RemoteNodes) -> list[Message]:
        joined, reports = remote.poll(self.nodes)
        for one in joined:
            node, host = one.node, one.agent.host
            if one.received is not None:
                reports += self._resume(node, one.agent, one.received, one.messages)
                continue
            self.add(node, one.agent)
            self._hosts[node], self._interface = host, self._interface or one.agent.interface
            reports.append({"is": "node_joined", "node": node, "host": host})
            reports += [{**message, "node": node} for message in one.messages]
        return reports

    def _receive(self, node: int) -> list[Message]:
        try:
            messages = self._agents[node].receive()
        except EOFError:
            return self._disconnect(node)
        self._update_events(node)
        if messages and isinstance(self._agents[node], RemoteAgent):
            self._silence.note_message(node)
        return [{**message, "node": node} for message in messages]

    def allow_redial(self, allowed: bool) -> None:
        """Set whether an agent may dial again after its connection broke: only while no rank has failed."""
        self._may_redial = allowed
        if not allowed:
            self._broken = dict.fromkeys(self._broken, 0.0)

    def _disconnect(self, node: int) -> list[Message]:
        """A connection broke. The agent of another machine may dial again; its messages are kept."""
        agent = self._agents[node]
        if not isinstance(agent, RemoteAgent):
            return [self._lose(node)]
        self._selector.unregister(agent)
        self._silence.forget(node)
        agent.disconnect()
        self._broken[node] = time.monotonic() + (RECONNECT_S if self._may_redial else 0.0)
        return []

    def _resume(self, node: int, again: RemoteAgent, received: int, messages: list[Message]) -> list[Message]:
        """The agent of a node has dialed again: go on where its last connection broke."""
        agent = self._agents[node]
        assert isinstance(agent, RemoteAgent), "of another machine"
        if node not in self._broken:  # only the other end has noticed
            self._disconnect(node)
        if not agent.resume(again, received):
            again.drop()
            return [self._lose(node)]
        del self._broken[node]
        self._selector.register(agent, agent.events, node)
        self._silence.note_message(node)
        agent.session.count(messages)
        return [{**message, "node": node} for message in messages]

    def _lose(self, node: int) -> Message:
        self.drop(node)
        return {"is": "agent_lost", "node": node}

    def _update_events(self, node: int) -> None:
        """Wait for room to send, where messages are queued."""
        agent = self._agents[node]
        if isinstance(agent, RemoteAgent) and not agent.broken:
            self._selector.modify(agent, agent.events, node)

    def add(self, node: int, agent: AgentConnection) -> None:
        """Add the agent of a node that has none."""
        self._agents[node] = agent
        if self.remote is not None and isinstance(agent, RemoteAgent):
            self.remote.sessions[node] = agent.session.name
            self._silence.note_message(node)
        self._selector.register(agent, selectors.EVENT_READ, node)

    def end_adoption(self) -> None:
        """From now on, agents that join get new ranks."""
        if self.remote is not None:
            self.remote.adopting = False

    def drop(self, node: int) -> None:
        """Close the connection to an agent that is gone."""
        agent = self._agents.pop(node)
        self._silence.forget(node)
        if self.remote is not None:
            self.remote.sessions.pop(node, None)
        if self._broken.pop(node, None) is None:
            self._selector.unregister(agent)
        if isinstance(agent, RemoteAgent):
            agent.drop()
        else:
            agent.close()

    @property
    def spares(self) -> int:
        """Agents without a node that can take over one."""
        return 0 if self.remote is None else self.remote.spares

    def release(self, node: int) -> None:
        """Let the agent of another machine end: its node leaves the run, and has no ranks."""
        agent = self._agents[node]
        assert isinstance(agent, RemoteAgent), "the supervisor's own node stays"
        if agent.broken:
            self.drop(node)
            return
        agent.end(ok=True, left=True)
        del self._agents[node]
        self._silence.forget(node)
        if self.remote is not None:
            self.remote.sessions.pop(node, None)
        # Closed by the agent: if this end closed first, the agent might not read that it was released.
        self._selector.modify(agent, agent.events, agent)
        self._released.append(agent)

    def _read_released(self, agent: RemoteAgent) -> None:
        """Go on with an agent that was told to end, until it closes the connection."""
        try:
            agent.receive()
            self._selector.modify(agent, agent.events, agent)
        except EOFError:
            self._selector.unregister(agent)
            self._released.remove(agent)
            agent.drop()

    def close(self, ok: bool = True) -> None:
        """End all agents and their ranks, and wait for them.

        Args:
            ok: Whether the run succeeded.
        """
        if self.remote is not None:
            self.remote.close(ok)
        for agent in self._agents.values():
            if isinstance(agent, RemoteAgent):
                agent.end(ok)
        for agent in (*self._agents.values(), *self._released):
            agent.close()
        self._agents, self._released = {}, []
        self._selector.close()
