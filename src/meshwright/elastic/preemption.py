"""Preempted nodes: the agent of a node received SIGTERM from a scheduler; the run goes on without the node.

The ranks of all nodes save a checkpoint after their step and end. Then the agent of the node is released. If
there is a spare node, it takes over, and the ranks of the same layout start again from that checkpoint.
Otherwise the run goes on in a smaller layout, if it may (``elastic.supervisor``). If neither is possible, the
whole run stops.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection
from dataclasses import dataclass

from meshwright.elastic.rank_supervisor import RankSupervisor
from meshwright.elastic.rank_view import State
from meshwright.elastic.recovery import Recovery
from meshwright.launch.channel import Message
from meshwright.launch.rank_process import RankCommand

COLLECT_S = 1.0
"""How long after the first SIGTERM nodes still leave together: a scheduler takes several away at once."""
SPARE_START_S = 60.0
"""How long a spare node that takes over may take to be ready, at least."""


@dataclass
class PreemptionSupervisor(RankSupervisor):
    """Lets nodes leave. The layout stays: spare nodes take over."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._leaving: set[int] = set()
        """Nodes that are about to be taken away, and still have an agent."""
        self._departing: frozenset[int] = frozenset()
        """Leaving nodes for which the ranks now save a checkpoint and end."""
        self._to_spares = False
        """Whether spare nodes take over from the departing ones."""
        self._leave_at = 0.0
        """When the nodes that leave are taken together."""

    def _on_leave(self, message: Message) -> None:
        """The agent of a node received SIGTERM."""
        if not self._leaving:
            self._leave_at = time.monotonic() + COLLECT_S
        self._leaving.add(message["node"])

    def _on_agent_lost(self, message: Message) -> None:
        """The agent is lost. Another agent that takes over the node is not preempted."""
        self._leaving.discard(message["node"])
        super()._on_agent_lost(message)

    def _on_spare_lost(self, message: Message) -> None:
        self._write_event("spare_lost", host=message["host"], reason=message["reason"])

    def _let_nodes_leave(self) -> None:
        """Release nodes without ranks, and let the ranks of the other leaving nodes end."""
        if not self._leaving or self._stop or self._departing:
            return
        self._leaving &= self._agents.nodes
        placed = self._agents.placement.nodes
        for node in sorted(self._leaving - placed):
            self._release(node, replaced=False)
        adopts = self._recovery is None and any(rank.alive for rank in self._ranks)
        if self.state is State.WAITING and not placed <= self._ready and not adopts:
            for node in sorted(self._leaving):  # the run waits for another agent already
                self._release(node, replaced=False)
                self._on_agent_lost({"node": node})
        elif self.state is State.RUNNING and self._leaving and time.monotonic() >= self._leave_at:
            self._depart(frozenset(self._leaving))

    def _depart(self, nodes: frozenset[int]) -> None:
        """Let all ranks save a checkpoint and end; or stop the run, if it cannot go on without some nodes."""
        if self._choose_action(nodes) == "stop":
            self._stop.append(signal.SIGTERM)
            return
        self._departing, self._recovery = nodes, None
        self._stop_after_step()

    def _forget_layout(self) -> None:
        """Spare nodes take over: the layout that was chosen without some nodes is not used."""

    def _choose_action(self, nodes: frozenset[int], announced: frozenset[int] = frozenset()) -> str:
        """How the run goes on without some nodes: ``replace``, ``shrink`` or ``stop``.

        Args:
            nodes: Those that leave.
            announced: Those of them that have an event already.
        """
        self._to_spares = self._agents.spares >= len(nodes)
        names = ", ".join(self._agents.name(node) for node in sorted(nodes))
        reason = f"{names} {'leaves' if len(nodes) == 1 else 'leave'} the run (SIGTERM)"
        action = "replace" if self._to_spares else "shrink"
        if not self._to_spares and not self._choose_layout_without(nodes, reason):
            action = "stop"
        for node in sorted(nodes - announced):
            self._write_event("node_leaving", node=node, host=self._agents.host(node), action=action)
        return action

    def _choose_layout_without(self, nodes: Collection[int], reason: str) -> bool:
        """Choose a layout without some nodes; returns whether there is one."""
        return False

    def _stop_after_step(self) -> None:
        """Let all ranks save a checkpoint after this step and end."""
        for rank in self._ranks:
            self._send_command(rank, RankCommand("stop", self.generation))

    def _halt(self) -> None:
        """A rank failed: nodes leave after the recovery, if they still can."""
        self._departing = frozenset()
        super()._halt()

    def _finish(self) -> None:
        """All ranks have ended as they should; without the nodes that leave, the run goes on."""
        departing, self._departing = self._departing, frozenset()
        if not departing or self._outcome != "interrupted" or self._stop:
            super()._finish()
            return
        late = (self._leaving & self._agents.nodes) - departing
        if late:  # they leave now, too: the state is saved
            departing |= late
            action = self._choose_action(departing, announced=departing - late)
            if action == "replace":
                self._forget_layout()
            if action == "stop":
                self._stop.append(signal.SIGTERM)
                super()._finish()
                return
        for node in sorted(departing & self._agents.nodes):
            self._release(node, self._to_spares)
        self._members -= departing  # they are not cut off: they have left
        if self._to_spares:
            self._wait_for_spares()
        else:
            super()._finish()

    def _wait_for_spares(self) -> None:
        """Start the ranks again when spare nodes have taken over."""
        self._recovery = Recovery(time.monotonic(), None)
        self._recovery.note_halted(None, "a node left the run")
        self._outcome = ""
        wait_s = max(self.budget.waits_for_node_s, SPARE_START_S)
        self.state, self._deadline = State.WAITING, time.monotonic() + wait_s

    def _release(self, node: int, replaced: bool) -> None:
        """Let the agent of a node end."""
        host = self._agents.host(node)
        self._agents.release(node)
        self._leaving.discard(node)
        self._ready.discard(node)
        for rank in self._on_node(node):
            rank.peak_flops_per_s = None  # another machine may replace it
        self._write_event("node_left", node=node, host=host, replaced=replaced)
