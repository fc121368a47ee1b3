"""Messages of one rank split into segments, and what each segment waits for: the program of an interpreter.

Segments of consecutive messages are pipelined: a part of a chunk is passed on while the next part arrives.
Messages are split at multiples of the segment size, counted from the start of the tensor. So both sides of a
message split it into the same segments, and overlapping messages are split at the same elements.

Receives are posted before they are needed: some segments per peer, and at most one step ahead. That has no
deadlock, even with rendezvous sends, if each message is sent and received in the same round:

- A rank that waits for a send is in the send's round or a later one. Its peer has not posted the receive, so
  the peer is in this round or an earlier one.
- A rank waits for a receive only if the sender is in an earlier round: a rank starts all sends of a round
  before it waits for anything of the round.
- So all ranks of a cycle are in one round, and wait for sends of this round. A rank that must post a receive
  of the next round has posted all of this round. A rank that adds to elements which the round also sends has
  posted all of this round, too: in such a step all receives are posted at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from meshwright.schedule.collective.steps import CollectiveSchedule, Combine, Receive, Send


class SendSegment(NamedTuple):
    """A part of a message to a peer."""

    peer: int
    low: int
    """First element."""
    high: int
    """One past the last element."""
    after: int
    """It starts when this many receives are complete."""


class ReceiveSegment(NamedTuple):
    """A part of a message from a peer."""

    peer: int
    low: int
    """First element."""
    high: int
    """One past the last element."""
    staged_at: int | None
    """Where in the staging buffer it waits to be added; None if it is received into its elements."""
    after: int
    """It is posted when this many receives are complete."""
    after_sends: tuple[int, ...]
    """Sends of its elements: complete before it is added, or before it is posted if it overwrites."""


@dataclass(frozen=True)
class Segments:
    """The program of one rank for one tensor size."""

    sends: tuple[SendSegment, ...]
    """In the order in which they start."""
    receives: tuple[ReceiveSegment, ...]
    """In the order in which they are posted and completed."""
    staging_elements: int
    """Size of the staging buffer."""


class _Segment(NamedTuple):
    """A segment of a message."""

    order: int
    """Position among the segments of its peer in the step. Segments are sorted by it: peers alternate."""
    peer: int
    low: int
    high: int
    reduces: bool


def split_into_segments(
    schedule: CollectiveSchedule, rank: int, elements: int, segment_elements: int, in_flight: int
) -> Segments:
    """The program of a rank.

    Args:
        schedule: A proved one.
        rank: The rank.
        elements: Number of elements of the tensor.
        segment_elements: Most elements of a segment.
        in_flight: Receives that are posted, per peer of a step.
    """
    spans = schedule.spans(elements)
    sends: list[SendSegment] = []
    receives: list[ReceiveSegment] = []
    written: dict[int, int] = {}  # by part of the tensor: the receives until the last one into it
    read: dict[int, list[int]] = defaultdict(list)  # by part: its sends that no receive waits for yet
    previous = begin = 0
    for step in schedule.rows[rank]:
        previous, begin = begin, len(receives)
        first_send = len(sends)
        for segment in _split(step.sends, spans, segment_elements):
            part = segment.low // segment_elements
            read[part].append(len(sends))
            sends.append(SendSegment(segment.peer, segment.low, segment.high, written.get(part, 0)))
        incoming = _split(step.receives, spans, segment_elements)
        sent = {send.low // segment_elements for send in sends[first_send:]}
        adds_to_sent = any(p.reduces and p.low // segment_elements in sent for p in incoming)
        window = len(incoming) if adds_to_sent else in_flight * len({p.peer for p in incoming})
        for number, segment in enumerate(incoming):
            part = segment.low // segment_elements
            # Sends of the same step are of other elements if the receive overwrites.
            last = len(sends) if segment.reduces else first_send
            waits = tuple(send for send in read[part] if send < last)
            read[part] = read[part][len(waits) :]
            after = max(previous, begin + number - window + 1, 0 if segment.reduces else written.get(part, 0))
            after = max(after, receives[-1].after if receives else 0)  # posted in order
            staged_at = 0 if segment.reduces else None
            receives.append(ReceiveSegment(segment.peer, segment.low, segment.high, staged_at, after, waits))
            written[part] = len(receives)
    return Segments(tuple(sends), *_assign_staging(receives))


def _split(
    messages: Sequence[Send | Receive], spans: Sequence[tuple[int, int]], segment_elements: int
) -> list[_Segment]:
    """The segments of the messages of a step. Messages of a peer stay in order; peers alternate."""
    counts: dict[int, int] = defaultdict(int)
    segments = []
    for message in messages:
        low, end = spans[message.start][0], spans[message.stop - 1][1]
        reduces = isinstance(message, Receive) and message.combine is Combine.REDUCE
        while low < end:
            high = min(end, (low // segment_elements + 1) * segment_elements)
            segments.append(_Segment(counts[message.peer], message.peer, low, high, reduces))
            counts[message.peer] += 1
            low = high
    return sorted(segments)


def _assign_staging(receives: Sequence[ReceiveSegment]) -> tuple[tuple[ReceiveSegment, ...], int]:
    """Place received segments in a ring buffer, where each stays until it is added; and the buffer's size."""
    sizes = [0 if r.staged_at is None else r.high - r.low for r in receives]
    until = [0, *accumulate(sizes)]
    # When a receive is posted, those before its ``after`` are complete.
    most = max((until[i + 1] - until[r.after] for i, r in enumerate(receives)), default=0)
    capacity = most + max(sizes, default=0)  # what is left at the end may be too small for the next one
    placed, at = [], 0
    for receive, size in zip(receives, sizes, strict=True):
        if receive.staged_at is None:
            placed.append(receive)
            continue
        at = at if at + size <= capacity else 0
        placed.append(receive._replace(staged_at=at))
        at += size
    return tuple(placed), capacity
