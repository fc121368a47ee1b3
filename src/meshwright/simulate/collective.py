"""Simulates a collective schedule on links that messages share.

The simulation is event-driven. A rank starts a step when the one before it is complete. A message starts when
both of its ranks have reached it (rendezvous), waits its latency (alpha), then moves at the rate that its
ports leave it (beta); a receive that reduces then adds the bytes (gamma), one message after the other per
rank. Rates change whenever a message starts or ends.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field

from meshwright.schedule.collective.steps import CollectiveSchedule, Combine, Receive, Send
from meshwright.simulate.collective_links import Links

TOGETHER = 1e-9
"""Messages that end within this share of a time end together: rounding must not split a round."""


@dataclass(frozen=True)
class CollectiveTimes:
    """When the steps of each rank end."""

    time_s: float
    """From the launch to the end of the last step."""
    step_end_s: tuple[tuple[float, ...], ...]
    """Per rank and step."""
    port_busy_s: tuple[float, ...]
    """Time in which each port has at least one message."""


def simulate_collective(schedule: CollectiveSchedule, size_bytes: int, links: Links) -> CollectiveTimes:
    """Simulate a proved schedule for a tensor of this many bytes.

    Raises:
        ValueError: The schedule does not end: prove it first.
    """
    run = _Simulation(schedule, size_bytes, links)
    run.run()
    return CollectiveTimes(run.now_s, tuple(map(tuple, run.step_end_s)), tuple(run.busy_s))


@dataclass
class _Flow:
    """A message in flight."""

    source: int
    target: int
    left: float
    """Bytes that have not arrived."""
    size: float
    reduces: bool
    ports: tuple[int, ...]
    rate: float = 0.0


@dataclass
class _Channel:
    """Messages of one pair of ranks that only one side has reached."""

    sends: deque[Send] = field(default_factory=deque)
    receives: deque[Receive] = field(default_factory=deque)


class _Simulation:
    def __init__(self, schedule: CollectiveSchedule, size_bytes: int, links: Links) -> None:
        self.schedule, self.links = schedule, links
        self.now_s = 0.0
        self.step_end_s: list[list[float]] = [[] for _ in schedule.rows]
        self.busy_s = [0.0] * len(links.bytes_per_s)
        self._spans = schedule.spans(size_bytes)
        self._pending = [0] * schedule.ranks
        self._sum_free_s = [0.0] * schedule.ranks
        self._channels: dict[tuple[int, int], _Channel] = defaultdict(_Channel)
        self._flows: list[_Flow] = []
        self._events: list[tuple[float, int, _Flow | None, int]] = []
        """Time, number, and a message that starts to move or a rank whose sum is done."""
        self._number = 0
        self._users = [0] * len(links.bytes_per_s)

    def run(self) -> None:
        """Run until every rank is done."""
        if not any(self.schedule.rows):
            return
        self.now_s = self.links.launch_s
        for rank in range(self.schedule.ranks):
            self._start_step(rank)
        while self._events or self._flows:
            self._advance()
        late = [r for r, row in enumerate(self.schedule.rows) if len(self.step_end_s[r]) < len(row)]
        if late:
            at = len(self.step_end_s[late[0]])
            raise ValueError(f"rank {late[0]} does not end its step {at}: prove the schedule first")

    def _start_step(self, rank: int) -> None:
        """Reach the next step; steps without messages are complete at once."""
        row = self.schedule.rows[rank]
        while len(self.step_end_s[rank]) < len(row):
            step = row[len(self.step_end_s[rank])]
            self._pending[rank] = len(step.sends) + len(step.receives)
            for send in step.sends:
                self._channels[rank, send.peer].sends.append(send)
                self._match(rank, send.peer)
            for receive in step.receives:
                self._channels[receive.peer, rank].receives.append(receive)
                self._match(receive.peer, rank)
            if step.sends or step.receives:
                return
            self.step_end_s[rank].append(self.now_s)

    def _match(self, source: int, target: int) -> None:
        channel = self._channels[source, target]
        while channel.sends and channel.receives:
            send, receive = channel.sends.popleft(), channel.receives.popleft()
            size = float(self._spans[send.stop - 1][1] - self._spans[send.start][0])
            ports = self.links.ports[source, target]
            flow = _Flow(source, target, size, size, receive.combine is Combine.REDUCE, ports)
            self._post(self.now_s + self.links.alpha_s[source, target], flow)

    def _post(self, time_s: float, flow: _Flow | None, rank: int = -1) -> None:
        self._number += 1
        heapq.heappush(self._events, (time_s, self._number, flow, rank))

    def _advance(self) -> None:
        """Go to the next time at which a message starts or ends, or a sum is done."""
        end_s = min((self.now_s + f.left / f.rate for f in self._flows), default=float("inf"))
        at_s = min(end_s, self._events[0][0] if self._events else float("inf"))
        self._move(at_s)
        limit = at_s * (1 + TOGETHER)
        ended = [f for f in self._flows if f.left <= f.rate * (limit - at_s)]
        if ended:
            self._flows = [f for f in self._flows if f.left > f.rate * (limit - at_s)]
            self._count(ended, -1)
        started = []
        done: list[int] = []
        while self._events and self._events[0][0] <= limit:
            _, _, flow, rank = heapq.heappop(self._events)
            if flow is None:
                done.append(rank)
            elif flow.size:
                started.append(flow)
            else:
                ended.append(flow)
        self._flows += started
        self._count(started, 1)
        for flow in ended:
            done += self._arrive(flow)
        for rank in done:
            self._pending[rank] -= 1
            if not self._pending[rank]:
                self.step_end_s[rank].append(self.now_s)
                self._start_step(rank)
        if started or ended:
            self._set_rates()

    def _move(self, at_s: float) -> None:
        seconds = at_s - self.now_s
        for flow in self._flows:
            flow.left -= flow.rate * seconds
        for port in {port for flow in self._flows for port in flow.ports}:
            self.busy_s[port] += seconds
        self.now_s = at_s

    def _arrive(self, flow: _Flow) -> list[int]:
        """The ranks whose side of the message is complete now."""
        if not (flow.reduces and self.links.gamma_s_per_byte):
            return [flow.source, flow.target]
        free_s = max(self.now_s, self._sum_free_s[flow.target])
        self._sum_free_s[flow.target] = free_s + flow.size * self.links.gamma_s_per_byte
        self._post(self._sum_free_s[flow.target], None, flow.target)
        return [flow.source]

    def _count(self, flows: list[_Flow], change: int) -> None:
        for flow in flows:
            for port in flow.ports:
                self._users[port] += change

    def _set_rates(self) -> None:
        widths, users = self.links.bytes_per_s, self._users
        for flow in self._flows:
            flow.rate = min([widths[port] / users[port] for port in flow.ports])
