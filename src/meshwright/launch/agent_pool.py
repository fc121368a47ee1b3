"""The agents of a run, one per node, and which of them has which rank.

Ranks are assigned to nodes in order: the first ``ranks_per_node`` ranks to node 0, and so on. Node 0 is the
machine of the supervisor.
"""

from __future__ import annotations

import selectors
from typing import Protocol

from meshwright.launch.channel import Message


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

    def __init__(self, local: AgentConnection, ranks_per_node: int) -> None:
        """Begin with the agent of this machine.

        Args:
            local: Of node 0.
            ranks_per_node: Ranks of each node; the last one may have fewer.
        """
        self.ranks_per_node = ranks_per_node
        self._agents: dict[int, AgentConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._add(0, local)

    @property
    def nodes(self) -> frozenset[int]:
        """Nodes whose agent is connected."""
        return frozenset(self._agents)

    def node_of(self, rank: int) -> int:
        """The node that a rank is assigned to."""
        return rank // self.ranks_per_node

    def send(self, rank: int, message: Message) -> None:
        """Send a message to the agent of a rank, if it is connected."""
        self.send_to_node(self.node_of(rank), message)

    def send_to_node(self, node: int, message: Message) -> None:
        """Send a message to the agent of a node, if it is connected."""
        if (agent := self._agents.get(node)) is not None:
            agent.send(message)

    def broadcast(self, message: Message) -> None:
        """Send a message to all agents."""
        for agent in self._agents.values():
            agent.send(message)

    def wait(self, timeout_s: float) -> list[Message]:
        """What the agents report within a time, each with its ``node``; ``agent_lost`` for one that ended."""
        messages: list[Message] = []
        for key, _ in self._selector.select(timeout_s):
            messages += self._receive(key.data)
        return messages

    def _receive(self, node: int) -> list[Message]:
        agent = self._agents[node]
        try:
            return [{**message, "node": node} for message in agent.receive()]
        except EOFError:
            self._selector.unregister(agent)
            del self._agents[node]
            agent.close()
            return [{"is": "agent_lost", "node": node}]

    def close(self) -> None:
        """End all agents and their ranks, and wait for them."""
        for agent in self._agents.values():
            agent.close()
        self._agents = {}
        self._selector.close()

    def _add(self, node: int, agent: AgentConnection) -> None:
        self._agents[node] = agent
        self._selector.register(agent, selectors.EVENT_READ, node)
