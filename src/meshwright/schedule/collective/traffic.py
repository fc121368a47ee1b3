"""Bytes that each rank sends and receives in a collective schedule."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.schedule.collective.steps import CollectiveSchedule


@dataclass(frozen=True)
class Traffic:
    """Elements (or bytes, with one byte per element) over the links, per rank."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    reduced: tuple[int, ...]
    """Received elements that are added."""

    @property
    def most(self) -> int:
        """The larger of sent and received, of the busiest rank."""
        return max((*self.sent, *self.received), default=0)


def count_traffic(schedule: CollectiveSchedule, elements: int) -> Traffic:
    """Count the traffic for a tensor of this many elements."""
    spans = schedule.spans(elements)
    sent, received, reduced = ([0] * schedule.ranks for _ in range(3))
    for rank, row in enumerate(schedule.rows):
        for step in row:
            for send in step.sends:
                sent[rank] += spans[send.stop - 1][1] - spans[send.start][0]
            for receive in step.receives:
                size = spans[receive.stop - 1][1] - spans[receive.start][0]
                received[rank] += size
                reduced[rank] += size if receive.combine == "reduce" else 0
    return Traffic(tuple(sent), tuple(received), tuple(reduced))
