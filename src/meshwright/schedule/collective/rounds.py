"""Messages by round: what generators return, and how algorithms are composed.

In a round a rank may send and receive several messages, all concurrent. Rounds are appended, run beside each
other, or reversed. The reverse of an algorithm that gives every rank each chunk once (broadcast, scatter,
all-gather) collects along the same paths: it is a reduce, a gather or a reduce-scatter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from meshwright.schedule.collective.steps import Combine, Receive, Rows, Send, Step

Chunks = Sequence[int]
"""Numbers of chunks."""


class Message(NamedTuple):
    """Chunks from one rank to another in one round."""

    round: int
    source: int
    target: int
    chunks: tuple[int, ...]
    combine: Combine


@dataclass(frozen=True)
class Rounds:
    """Messages of consecutive rounds."""

    messages: tuple[Message, ...] = ()
    count: int = 0
    """Number of rounds."""

    def then(self, other: Rounds) -> Rounds:
        """These rounds, then others."""
        later = tuple(m._replace(round=m.round + self.count) for m in other.messages)
        return Rounds(self.messages + later, self.count + other.count)

    def beside(self, other: Rounds) -> Rounds:
        """These rounds and others at the same time."""
        return Rounds(self.messages + other.messages, max(self.count, other.count))

    def reverse(self, combine: Combine) -> Rounds:
        """The messages in opposite order and direction."""
        last = self.count - 1
        messages = (Message(last - m.round, m.target, m.source, m.chunks, combine) for m in self.messages)
        return Rounds(tuple(reversed(list(messages))), self.count)

    def rows(self, ranks: int) -> Rows:
        """The steps of each rank."""
        sends: list[dict[int, list[Send]]] = [defaultdict(list) for _ in range(ranks)]
        receives: list[dict[int, list[Receive]]] = [defaultdict(list) for _ in range(ranks)]
        for at, source, target, chunks, combine in self.messages:
            for start, stop in _ranges(chunks):
                sends[source][at].append(Send(target, start, stop))
                receives[target][at].append(Receive(source, start, stop, combine))
        return tuple(
            tuple(
                Step(at, tuple(sends[rank].get(at, ())), tuple(receives[rank].get(at, ())))
                for at in sorted(sends[rank].keys() | receives[rank].keys())
            )
            for rank in range(ranks)
        )


def collect_rounds(messages: Iterable[Message]) -> Rounds:
    """Rounds of messages; messages without chunks are left out."""
    found = tuple(m for m in messages if m.chunks)
    return Rounds(found, max((m.round + 1 for m in found), default=0))


def copy_message(at: int, source: int, target: int, chunks: Iterable[int]) -> Message:
    """A message whose receiver copies."""
    return Message(at, source, target, tuple(chunks), Combine.COPY)


def run_beside(parts: Iterable[Rounds]) -> Rounds:
    """All of these at the same time."""
    messages: list[Message] = []
    count = 0
    for part in parts:
        messages += part.messages
        count = max(count, part.count)
    return Rounds(tuple(messages), count)


def _ranges(chunks: Chunks) -> list[tuple[int, int]]:
    """Contiguous ranges of chunks."""
    found = []
    for _, run in groupby(enumerate(sorted(chunks)), key=lambda pair: pair[1] - pair[0]):
        numbers = [chunk for _, chunk in run]
        found.append((numbers[0], numbers[-1] + 1))
    return found
