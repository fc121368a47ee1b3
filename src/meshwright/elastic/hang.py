"""The hang verdict: which rank the others wait for, since when, in which collective, and why.

``find_hang`` is a pure function of the flight recorders and of what the watcher observed from outside: exit
status, stopped or not, age of the heartbeat, time without CPU use. The n-th call on a channel is the same
collective on every rank, so sequence numbers show who has not called it. Whether a rank that is behind is
stuck or computes is decided by its CPU time: a rank that waits for a peer, for data or for storage uses none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.core.flight_ring import CallRecord, Flight

ENDS_RUN = frozenset({"ended", "raised", "mismatch", "skipped", "stopped", "silent"})
"""Causes after which a run cannot continue by itself. Data, storage and connections may recover."""
WRONG_CALLS = frozenset({"mismatch", "skipped"})
"""Causes that another attempt would repeat."""
NO_HANG = frozenset({"computing", "running"})
ANY_SIZE = frozenset({"all_to_all", "gather", "scatter", "barrier"})
"""Collectives whose tensors may differ in size between ranks."""
WAITER_S = 1.0
"""Time without CPU use after which a rank is named as waiting for one that is stuck."""
BETWEEN_STEPS = frozenset({"setup", "evaluation", "checkpoint"})
"""Phases whose calls are not repeated in every step."""

Call = tuple[str, str, str, int, str]
"""Group, direction, op, elements and dtype of a call."""


@dataclass(frozen=True)
class RankState:
    """One rank as the watcher sees it. Ages are measured by the watcher's monotonic clock."""

    rank: int
    flight: Flight | None
    """None before the rank has started."""
    exit: str = ""
    """How its process ended, such as ``killed by SIGKILL``; empty while it runs."""
    stopped: bool = False
    """Stopped by a signal (SIGSTOP)."""
    silent_s: float = 0.0
    """Time since the heartbeat changed or CPU time was used."""
    idle_s: float = 0.0
    """Time since the process used CPU time or wrote to its recorder."""


@dataclass(frozen=True)
class Verdict:
    """What a run waits for, in one sentence and its parts."""

    cause: str
    """``ended``, ``raised``, ``mismatch``, ``skipped``, ``stopped``, ``silent``, ``data``, ``storage``,
    ``blocked`` or ``partition``; ``computing`` or ``running`` if nothing hangs."""
    verdict: str
    """The sentence."""
    rank: int | None = None
    """The rank that the others wait for, if it is one."""
    axis: str = ""
    op: str = ""
    """The collective that waits."""
    source: str = ""
    """``file:line`` at which ``rank`` is, or where it made the wrong call."""
    since_s: float = 0.0
    step: int = 0
    waiting: tuple[int, ...] = ()
    """Ranks that wait in a collective."""

    @property
    def is_hang(self) -> bool:
        """Whether the run is stuck."""
        return self.cause not in NO_HANG

    @property
    def ends_run(self) -> bool:
        """Whether the run cannot continue by itself."""
        return self.cause in ENDS_RUN

    def as_dict(self) -> dict[str, Any]:
        """The verdict for ``--json`` and for events."""
        return {**asdict(self), "since_s": round(self.since_s, 3), "waiting": list(self.waiting)}


def find_hang(states: Sequence[RankState], now_ns: int, limit_s: float) -> Verdict:
    """Find out what a run waits for.

    Args:
        states: States of all ranks.
        now_ns: ``CLOCK_MONOTONIC`` of this machine.
        limit_s: A rank that used no CPU time for this long is waiting; one without heartbeat is silent.
    """
    return _Ranks(states, now_ns, limit_s).judge()


class _Ranks:
    """The ranks of a run and who waits for whom."""

    def __init__(self, states: Sequence[RankState], now_ns: int, limit_s: float) -> None:
        self._states = {s.rank: s for s in states if not (s.flight and s.flight.progress.phase == "finished")}
        flights = {rank: state.flight for rank, state in self._states.items() if state.flight is not None}
        newest = max((flight.progress.generation for flight in flights.values()), default=0)
        self._flights = {r: f for r, f in flights.items() if f.progress.generation == newest}
        self._now_ns, self._limit_s = now_ns, limit_s

    def judge(self) -> Verdict:
        """The first verdict that applies; wrong calls first, as they also cause errors and silence."""
        return self._find_mismatch() or self._find_failed() or self._find_silent() or self._find_blocker()

    def _find_mismatch(self) -> Verdict | None:
        """Two ranks whose n-th call on a channel differs."""
        first: dict[tuple[str, str, int], dict[int, CallRecord]] = {}
        for rank, flight in self._flights.items():
            for record in flight.records:
                first.setdefault((record.channel.group, record.channel.direction, record.sequence), {})[
                    rank
                ] = record
        wrong = [calls for calls in first.values() if len({_signature(r) for r in calls.values()}) > 1]
        if not wrong:
            return None
        calls = min(wrong, key=lambda calls: min(r.begin_ns for r in calls.values()))
        rank = self._find_deviating({rank: _signature(record) for rank, record in calls.items()})
        record = calls[rank]
        other = next(r for r in calls.values() if _signature(r) != _signature(record))
        others = [r for r, call in calls.items() if _signature(call) == _signature(other)]
        if skipped := self._find_skipped(rank):
            return self._skipped(rank, skipped, record)
        text = (
            f"rank {rank} called {_describe(record, sizes=True)} in {_where(record)}, where "
            f"{_name(others)} called {_describe(other, sizes=True)}{self._ago(record)}"
        )
        return self._verdict("mismatch", text, rank, record, record.source)

    def _find_failed(self) -> Verdict | None:
        """A rank that raised or ended. The others fail or wait because of it."""
        raised = [rank for rank, flight in self._flights.items() if flight.progress.raised]
        ended = [rank for rank, state in self._states.items() if state.exit]
        for cause, ranks in (("raised", raised), ("ended", ended)):
            if not ranks:
                continue
            rank = min(ranks, key=self._last_sign_ns)
            flight, state = self._flights.get(rank), self._states[rank]
            how = (
                f"raised {flight.progress.raised}"
                if cause == "raised" and flight
                else f"ended ({state.exit})"
            )
            last = flight.records[-1] if flight and flight.records else None
            after = f", after {_describe(last)}" if last else ""
            return self._verdict(cause, f"rank {rank} {how}{self._place(rank)}{after}", rank, last)
        return None

    def _find_silent(self) -> Verdict | None:
        """A process that is stopped, or that has neither a heartbeat nor CPU time."""
        for rank, state in self._states.items():
            if state.flight is None or state.silent_s < self._limit_s:
                continue
            cause = "stopped" if state.stopped else "silent"
            what = "has been stopped (SIGSTOP)" if state.stopped else "has had no heartbeat and no CPU time"
            since_s = max(state.silent_s, (self._now_ns - state.flight.progress.heartbeat_ns) / 1e9)
            text = f"rank {rank} {what} for {since_s:.1f} s{self._place(rank)}{self._at(rank)}"
            return self._blocked_by(cause, text, rank, since_s)
        return None

    def _find_blocker(self) -> Verdict:
        """Follow the waiting ranks to one that does not wait for another rank."""
        waits = {
            rank: record
            for rank in self._flights
            if (record := self._find_wait(rank, self._limit_s)) is not None
        }
        missing = {rank: self._find_missing(rank, record) for rank, record in waits.items()}
        blockers = [
            rank for rank in self._flights if any(rank in m for m in missing.values()) and rank not in waits
        ]
        if waits and not blockers:
            return self._find_cycle(waits)
        stuck = blockers or list(self._flights)
        busy = [rank for rank in stuck if not self._is_idle(rank)]
        if busy or not stuck:
            return self._progressing([rank for rank in busy if rank in blockers])
        verdicts = [v for rank in stuck if (v := self._explain_idle(rank)) is not None]
        if verdicts:
            return verdicts[0]
        return self._find_partition(stuck) or self._progressing([])

    def _find_wait(self, rank: int, limit_s: float) -> CallRecord | None:
        """The oldest call of an idle rank that another rank has not made; sends come last."""
        flight = self._flights[rank]
        if self._states[rank].idle_s < limit_s:
            return None
        progress = flight.progress
        since_ns = progress.phase_begin_ns if progress.phase in ("waiting for data", "checkpoint") else 0
        open_calls = [
            record
            for record in flight.records
            if not record.end_ns and record.begin_ns >= since_ns and self._find_missing(rank, record)
        ]
        return min(open_calls, key=lambda r: (r.op == "send", r.begin_ns), default=None)

    def _find_missing(self, rank: int, record: CallRecord) -> list[int]:
        """The members of the channel that have not made this call."""
        key = (record.channel.group, record.channel.direction)
        members = record.channel.members or tuple(r for r, f in self._flights.items() if key in f.issued)
        return [
            member
            for member in members
            if member != rank and member in self._flights
            and self._flights[member].issued.get(key, 0) < record.sequence
        ]  # fmt: skip

    def _find_cycle(self, waits: dict[int, CallRecord]) -> Verdict:
        """Ranks that wait for each other in different calls: one of them skipped a call."""
        rank = self._find_deviating({rank: _signature(record) for rank, record in waits.items()})
        record = waits[rank]
        if skipped := self._find_skipped(rank):
            return self._skipped(rank, skipped, record)
        other_rank, other = next(
            ((r, w) for r, w in waits.items() if rank in self._find_missing(r, w)), (rank, record)
        )
        text = (
            f"rank {rank} waits in {_describe(record)} in {_where(record)}, and did not call "
            f"{_describe(other)}, in which rank {other_rank} waits{self._since(other)}"
        )
        return self._verdict("skipped", text, rank, other, record.source)

    def _find_deviating(self, calls: dict[int, Call]) -> int:
        """The rank in the minority; of two, the one whose calls differ from its previous step."""
        votes = Counter(calls.values())
        fewest = min(votes.values())
        minority = [rank for rank, call in calls.items() if votes[call] == fewest]
        changed = [rank for rank in minority if self._find_change(rank) is not None]
        return max(changed or minority)

    def _find_change(self, rank: int) -> tuple[list[CallRecord], CallRecord] | None:
        """The first call of the running step that differs from the previous step.

        Returns:
            The calls of the previous step from there on, and the call; None if there is none, or if the
            recorder does not have the whole previous step.
        """
        flight = self._flights[rank]
        step = flight.progress.step
        calls = [record for record in flight.records if record.phase not in BETWEEN_STEPS]
        before = [record for record in calls if record.step == step - 1]
        if not before or (step > 2 and flight.records[0].step == step - 1):
            return None
        for index, record in enumerate(r for r in calls if r.step == step):
            if index >= len(before) or _signature(before[index]) != _signature(record):
                return before[index:], record
        return None

    def _find_skipped(self, rank: int) -> CallRecord | None:
        """The call of the previous step that this rank left out: it went on with a later one."""
        change = self._find_change(rank)
        if change is None or not change[0]:
            return None
        (expected, *following), record = change
        return expected if any(_signature(r) == _signature(record) for r in following) else None

    def _skipped(self, rank: int, skipped: CallRecord, record: CallRecord) -> Verdict:
        last = self._flights[rank].records[-1]
        text = (
            f"rank {rank} skipped {_describe(skipped)} in step {record.step} and went on to "
            f"{_describe(last)}{self._ago(last)}"
        )
        since_s = max(0.0, (self._now_ns - last.begin_ns) / 1e9)
        made = replace(skipped, step=record.step)
        return self._verdict("skipped", text, rank, made, last.source, since_s)

    def _explain_idle(self, rank: int) -> Verdict | None:
        """Why a rank that waits for no other rank makes no progress."""
        progress = self._flights[rank].progress
        idle_s, since_s = self._states[rank].idle_s, (self._now_ns - progress.phase_begin_ns) / 1e9
        step, at = progress.step, self._at(rank)
        if progress.phase == "waiting for data":
            text = f"rank {rank} has waited for data in step {step}{at} for {since_s:.1f} s"
            return self._blocked_by("data", text, rank, since_s)
        if progress.phase == "checkpoint":
            text = f"rank {rank} has waited for storage to save step {step}{at} for {idle_s:.1f} s"
            return self._blocked_by("storage", text, rank, idle_s)
        if progress.phase == "setup" or self._is_in_call(rank):
            return None
        where = f"outside of any collective{self._place(rank)}{at}"
        text = f"rank {rank} has been blocked {where} for {idle_s:.1f} s"
        return self._blocked_by("blocked", text, rank, idle_s)

    def _is_in_call(self, rank: int) -> bool:
        """Whether a rank is in its last call, as far as its recorder shows."""
        flight = self._flights[rank]
        progress, last = flight.progress, flight.records[-1] if flight.records else None
        if last is None or last.end_ns or last.begin_ns < progress.phase_begin_ns:
            return False
        return progress.wait_begin_ns > 0 or progress.source == last.source

    def _find_partition(self, ranks: Sequence[int]) -> Verdict | None:
        """All ranks are in calls that all members made: no data arrive."""
        if len(self._flights) < 2 or not all(self._is_in_call(rank) for rank in ranks):
            return None
        record = min((self._flights[rank].records[-1] for rank in ranks), key=lambda r: r.begin_ns)
        members = record.channel.members or tuple(ranks)
        text = (
            f"{_name(members)} all called {_describe(record)} in {_where(record)}, and no data arrive: the "
            f"connection between them is broken{self._since(record)}"
        )
        return self._verdict("partition", text, None, record, record.source)

    def _progressing(self, blockers: Sequence[int]) -> Verdict:
        """Nothing hangs; says which rank the others wait for."""
        if not blockers:
            return Verdict("running", "no rank is stuck")
        rank = blockers[0]
        text = f"no rank is stuck: rank {rank} computes{self._place(rank)}{self._at(rank)}"
        return self._blocked_by("computing", text, rank, 0.0)

    def _blocked_by(self, cause: str, text: str, rank: int, since_s: float) -> Verdict:
        """A verdict on a rank that is not in a collective, with the ranks that wait for it."""
        found = {other: self._find_wait_for(other, rank) for other in self._flights if other != rank}
        waits = {other: record for other, record in found.items() if record is not None}
        progress = self._flights[rank].progress
        blocked = Verdict(cause, text, rank, source=progress.source, since_s=since_s, step=progress.step)
        if not waits:
            return blocked
        direct = {o: r for o, r in waits.items() if rank in r.channel.members} or waits
        record = min(direct.values(), key=lambda r: r.begin_ns)
        text += f"; {_name(sorted(direct))} {_waits(direct)} for it in {_describe(record)}"
        axis = record.channel.axis
        return replace(blocked, verdict=text, axis=axis, op=record.op, waiting=tuple(sorted(waits)))

    def _find_wait_for(self, rank: int, blocker: int) -> CallRecord | None:
        """The call in which a rank waits: others have not made it, or the blocker takes part in it."""
        flight, limit_s = self._flights[rank], min(WAITER_S, self._limit_s)
        found = self._find_wait(rank, limit_s)
        if found is not None or self._states[rank].idle_s < limit_s or not flight.records:
            return found
        last = flight.records[-1]
        same_phase = last.begin_ns >= flight.progress.phase_begin_ns
        return last if same_phase and not last.end_ns and blocker in last.channel.members else None

    def _verdict(
        self,
        cause: str,
        text: str,
        rank: int | None,
        record: CallRecord | None,
        source: str = "",
        since_s: float | None = None,
    ) -> Verdict:
        if record is None:
            return Verdict(cause, text, rank, source=source, since_s=since_s or 0.0)
        if since_s is None:
            since_s = max(0.0, (self._now_ns - record.begin_ns) / 1e9)
        axis, op = record.channel.axis, record.op
        return Verdict(cause, text, rank, axis, op, source or record.source, since_s, record.step)

    def _since(self, record: CallRecord) -> str:
        return f" for {max(0.0, (self._now_ns - record.begin_ns) / 1e9):.1f} s"

    def _ago(self, record: CallRecord) -> str:
        return f", {max(0.0, (self._now_ns - record.begin_ns) / 1e9):.1f} s ago"

    def _is_idle(self, rank: int) -> bool:
        return self._states[rank].idle_s >= self._limit_s

    def _last_sign_ns(self, rank: int) -> int:
        flight = self._flights.get(rank)
        return flight.progress.heartbeat_ns if flight else 0

    def _place(self, rank: int) -> str:
        flight = self._flights.get(rank)
        if flight is None:
            return " before its start"
        step = f" of step {flight.progress.step}" if flight.progress.step else ""
        return f" in {flight.progress.phase}{step}"

    def _at(self, rank: int) -> str:
        source = self._flights[rank].progress.source
        return f" at {source}" if source else ""


def _signature(record: CallRecord) -> Call:
    """The part of a call that must be equal on all ranks of a channel. A send matches a receive."""
    op = "send/recv" if record.channel.direction else record.op
    numel, dtype = (0, "") if record.op in ANY_SIZE else (record.numel, record.dtype)
    return record.channel.group, record.channel.direction, op, numel, dtype


def _describe(record: CallRecord, sizes: bool = False) -> str:
    """``all_reduce of dp_replicate at file:line``."""
    axis = f" of {record.channel.axis}"
    if record.channel.direction:
        source, _, target = record.channel.direction.partition(">")
        axis += f" from rank {source} to rank {target}"
    size = ""
    if sizes and record.op != "barrier":
        shape = f"shape {list(record.shape)}" if record.shape is not None else f"{record.numel} elements"
        size = f" with {shape} {record.dtype}"
    return f"{record.op}{axis}{size} at {record.source}" if record.source else f"{record.op}{axis}{size}"


def _where(record: CallRecord) -> str:
    return f"{record.phase} of step {record.step}" if record.step else record.phase


def _name(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0 and 2``."""
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _waits(ranks: Sequence[int] | dict[int, CallRecord]) -> str:
    return "waits" if len(ranks) == 1 else "wait"
