"""Proves that a collective schedule is correct, and counts its steps.

The schedule is executed without times and with contributors instead of data: for each rank and chunk, the
ranks whose data are in it. A step starts when the one before it is complete, and is complete when all of its
messages are. Sends are rendezvous: a send is complete when its receiver has reached the step that receives
it. A schedule that ends with rendezvous sends also ends with buffered ones. Messages are matched in order per
pair of ranks, so the result does not depend on the speed of the ranks: one execution proves all.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from enum import StrEnum

from meshwright.schedule.collective.ops import blocks_after, blocks_before, contributors
from meshwright.schedule.collective.steps import CollectiveSchedule, Combine, Receive, Send, name_chunks

MAX_VIOLATIONS = 20
"""Reported violations; one mistake in a generator breaks every later step."""
Holding = int
"""Contributors of a chunk as a bit mask: bit r for rank r."""


class ViolationKind(StrEnum):
    """Kinds of errors in a schedule."""

    CONTENT = "content"
    """A rank sends or adds to a chunk that it does not have, or sends to itself."""
    DOUBLED = "doubled"
    """A contribution is added twice."""
    OVERLAP = "overlap"
    """A receive of a step writes what another message of the step reads or writes."""
    MISMATCH = "mismatch"
    """Sender and receiver of a message disagree on its chunks."""
    UNMATCHED = "unmatched"
    """A message without its other side."""
    DEADLOCK = "deadlock"
    """A rank waits for a rank that waits, directly or indirectly, for it."""
    RESULT = "result"
    """A rank does not end with the right result."""


@dataclass(frozen=True)
class Violation:
    """One error, with its rank and step."""

    kind: ViolationKind
    rank: int
    step: int
    """Index in the steps of the rank."""
    message: str
    """The violated rule, without rank and step."""

    def __str__(self) -> str:
        return f"rank {self.rank}, step {self.step}: {self.message}"


@dataclass(frozen=True)
class Proof:
    """The result of a proof."""

    violations: tuple[Violation, ...]
    """Empty if the schedule is correct."""
    steps: int
    """Length of the critical path: messages that must follow each other."""
    messages: int
    """Number of messages."""

    @property
    def proved(self) -> bool:
        """Whether there are no violations."""
        return not self.violations


def prove_collective(schedule: CollectiveSchedule) -> Proof:
    """Check a schedule. Errors are returned, not raised."""
    run = _Execution(schedule)
    run.run()
    run.find_stuck()
    if not run.violations:
        run.check_result()
    messages = sum(len(step.sends) for row in schedule.rows for step in row)
    return Proof(tuple(run.violations[:MAX_VIOLATIONS]), max(run.clock, default=0), messages)


@dataclass
class _Posted:
    """One side of a message that has been started."""

    rank: int
    step: int
    index: int
    """Position among the sends, or receives, of the step."""
    action: Send | Receive
    payload: tuple[Holding, ...] = ()
    """Contributors of each chunk, of a send."""


@dataclass
class _Channel:
    """Messages from one rank to another that only one side has started."""

    sends: deque[_Posted] = field(default_factory=deque)
    receives: deque[_Posted] = field(default_factory=deque)


class _Execution:
    """All ranks at once: each advances while its messages are matched."""

    def __init__(self, schedule: CollectiveSchedule) -> None:
        self.schedule = schedule
        self.violations: list[Violation] = []
        self.position = [0] * schedule.ranks
        self.clock = [0] * schedule.ranks
        """Messages on the critical path until the current step starts."""
        self._ends = [0] * schedule.ranks
        self._pending = [0] * schedule.ranks
        self._arrived: list[dict[int, tuple[Holding, ...]]] = [{} for _ in range(schedule.ranks)]
        self._channels: dict[tuple[int, int], _Channel] = defaultdict(_Channel)
        self._written: list[dict[int, int]] = [{} for _ in range(schedule.ranks)]
        self._held = [self._initial(rank) for rank in range(schedule.ranks)]

    def _initial(self, rank: int) -> dict[int, Holding]:
        s = self.schedule
        blocks = blocks_before(s.op, rank, s.ranks, s.root, s.blocks)
        return {chunk: 1 << rank for block in blocks for chunk in s.block_chunks(block)}

    def run(self) -> None:
        """Run until no rank can advance."""
        ready = [rank for rank, row in enumerate(self.schedule.rows) if row]
        for rank in ready:
            self._start(rank)
        ready = [rank for rank in ready if not self._pending[rank]]
        while ready:
            rank = ready.pop()
            while self.position[rank] < len(self.schedule.rows[rank]) and not self._pending[rank]:
                self._complete(rank)
                if self.position[rank] < len(self.schedule.rows[rank]):
                    ready += self._start(rank)

    def _start(self, rank: int) -> list[int]:
        """Post the messages of a rank's step; returns other ranks whose step became complete."""
        step = self.schedule.rows[rank][self.position[rank]]
        self._ends[rank] = self.clock[rank]
        self._pending[rank] = len(step.sends) + len(step.receives)
        self._arrived[rank] = {}
        self._check_overlap(rank)
        released = []
        at = self.position[rank]
        for index, send in enumerate(step.sends):
            channel = self._channels[rank, send.peer]
            channel.sends.append(_Posted(rank, at, index, send, self._read(rank, send)))
            released += self._match(channel)
        for index, receive in enumerate(step.receives):
            channel = self._channels[receive.peer, rank]
            channel.receives.append(_Posted(rank, at, index, receive))
            released += self._match(channel)
        return [other for other in released if other != rank]

    def _read(self, rank: int, send: Send) -> tuple[Holding, ...]:
        held = self._held[rank]
        missing = [chunk for chunk in range(send.start, send.stop) if not held.get(chunk)]
        if missing:
            self._report(ViolationKind.CONTENT, rank, f"{send}, but does not have chunk {missing[0]}")
        if send.peer == rank or not 0 <= send.peer < self.schedule.ranks:
            self._report(ViolationKind.CONTENT, rank, f"{send}, which is not another rank")
        return tuple(held.get(chunk, 0) for chunk in range(send.start, send.stop))

    def _match(self, channel: _Channel) -> list[int]:
        """Match messages in order; returns ranks whose step became complete."""
        released = []
        while channel.sends and channel.receives:
            send, receive = channel.sends.popleft(), channel.receives.popleft()
            end = 1 + max(self.clock[send.rank], self.clock[receive.rank])
            if send.action[1:3] != receive.action[1:3]:
                message = (
                    f"{receive.action}, which sends {name_chunks(*send.action[1:3])} in its step {send.step}"
                )
                self._report(ViolationKind.MISMATCH, receive.rank, message)
            self._arrived[receive.rank][receive.index] = send.payload
            for side in (send, receive):
                self._ends[side.rank] = max(self._ends[side.rank], end)
                self._pending[side.rank] -= 1
                if not self._pending[side.rank]:
                    released.append(side.rank)
        return released

    def _complete(self, rank: int) -> None:
        """Apply the receives of a rank's step."""
        step = self.schedule.rows[rank][self.position[rank]]
        held = self._held[rank]
        for index, receive in enumerate(step.receives):
            payload = self._arrived[rank][index]
            for chunk, received in zip(range(receive.start, receive.stop), payload, strict=False):
                if receive.combine is Combine.REDUCE:
                    self._check_sum(rank, receive, chunk, held.get(chunk, 0), received)
                    held[chunk] = held.get(chunk, 0) | received
                else:
                    held[chunk] = received
                self._written[rank][chunk] = self.position[rank]
        self.clock[rank] = self._ends[rank]
        self.position[rank] += 1

    def _check_sum(self, rank: int, receive: Receive, chunk: int, mine: Holding, received: Holding) -> None:
        if not mine:
            self._report(ViolationKind.CONTENT, rank, f"{receive}, but does not have chunk {chunk}")
        if mine & received:
            twice = _name_ranks(mine & received)
            self._report(
                ViolationKind.DOUBLED,
                rank,
                f"{receive}: the data of {twice} would count twice in chunk {chunk}",
            )

    def _check_overlap(self, rank: int) -> None:
        """Receives of a step must not write what the step sends, except by adding; nor the same chunk."""
        step = self.schedule.rows[rank][self.position[rank]]
        sent = {chunk for send in step.sends for chunk in range(send.start, send.stop)}
        copied: set[int] = set()
        added: set[int] = set()
        for receive in step.receives:
            chunks = set(range(receive.start, receive.stop))
            copies = receive.combine is Combine.COPY
            if chunks & copied or (copies and chunks & (sent | added)):
                self._report(
                    ViolationKind.OVERLAP, rank, f"{receive}, which another message of the step uses"
                )
            (copied if copies else added).update(chunks)

    def find_stuck(self) -> None:
        """Report ranks that cannot finish, and what each of them waits for."""
        for (source, target), channel in self._channels.items():
            for posted in (*channel.sends, *channel.receives):
                self._report_waiting(posted, target if posted.rank == source else source)

    def _report_waiting(self, posted: _Posted, peer: int) -> None:
        """One message that is not matched: its peer is finished, absent, or waits itself."""
        rows, ranks = self.schedule.rows, self.schedule.ranks
        sends = isinstance(posted.action, Send)
        at = self.position[peer] if 0 <= peer < ranks else 0
        later = rows[peer][at:] if 0 <= peer < ranks else ()
        others = [action for step in later for action in (step.receives if sends else step.sends)]
        if any(action.peer == posted.rank for action in others):
            kind, message = ViolationKind.DEADLOCK, f"{posted.action}, which waits in its step {at}"
        else:
            verb = "receives" if sends else "sends"
            kind, message = ViolationKind.UNMATCHED, f"{posted.action}, which never {verb} it"
        self.violations.append(Violation(kind, posted.rank, posted.step, message))

    def check_result(self) -> None:
        """Compare what each rank has at the end with what the operation asks for."""
        s = self.schedule
        for rank in range(s.ranks):
            for block in blocks_after(s.op, rank, s.ranks, s.root, s.blocks):
                wanted = sum(1 << r for r in contributors(s.op, block, s.ranks, s.root))
                for chunk in s.block_chunks(block):
                    has = self._held[rank].get(chunk, 0)
                    if has != wanted:
                        self._report_result(rank, chunk, has, wanted)

    def _report_result(self, rank: int, chunk: int, has: Holding, wanted: Holding) -> None:
        lacks = f"lacks the data of {_name_ranks(wanted & ~has)}" if wanted & ~has else ""
        extra = f"has the data of {_name_ranks(has & ~wanted)}" if has & ~wanted else ""
        last = self._written[rank].get(chunk)
        when = "never received" if last is None else "last received in this step"
        step = max(len(self.schedule.rows[rank]) - 1, 0) if last is None else last
        what = " and ".join(part for part in (lacks, extra) if part)
        message = f"chunk {chunk}, {when}, {what} at the end"
        self.violations.append(Violation(ViolationKind.RESULT, rank, step, message))

    def _report(self, kind: ViolationKind, rank: int, message: str) -> None:
        self.violations.append(Violation(kind, rank, self.position[rank], message))


def _name_ranks(mask: Holding) -> str:
    """Ranks in words; the first few of many."""
    ranks = [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
    shown = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
