"""Proves that a schedule is correct: every action once, after its producer, and without deadlock.

All ranks advance together without times: each runs until its next action needs a result that does not exist
yet. Actions that remain when no rank can advance are a deadlock, whatever the times. If none remain, every
interleaving of the ranks works, because ranks wait for results. Peaks are counted along each rank's order,
and do not depend on times either.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from meshwright.schedule.pipeline.actions import Action, Kind, PipelineSchedule, producer_of

MAX_VIOLATIONS = 20
"""Reported violations per kind; one mistake in a generator breaks every micro-batch."""


class ViolationKind(StrEnum):
    """Kinds of errors in a schedule."""

    MISSING = "missing"
    """A required action is missing."""
    DOUBLED = "doubled"
    """An action occurs more than once."""
    STRAY = "stray"
    """An action with an unknown stage, micro-batch or kind, or on the wrong rank."""
    ORDER = "order"
    """A rank runs an action before its producer on the same rank."""
    DEADLOCK = "deadlock"
    """A rank waits for a result that is never computed."""


@dataclass(frozen=True)
class Violation:
    """One error, with its rank and action."""

    kind: ViolationKind
    rank: int
    action: Action
    message: str
    """The violated rule, without rank and action."""

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.action}: {self.message}"


@dataclass(frozen=True)
class Proof:
    """The result of a proof."""

    violations: tuple[Violation, ...]
    """Empty if the schedule is correct."""
    actions: int
    """Number of actions."""
    peak_in_flight: tuple[int, ...]
    """Peak in-flight activations per rank, each of one stage and micro-batch."""
    peak_by_stage: tuple[int, ...]
    """The same per stage."""

    @property
    def proved(self) -> bool:
        """Whether there are no violations."""
        return not self.violations


def prove_schedule(schedule: PipelineSchedule) -> Proof:
    """Check a schedule. Errors are returned, not raised."""
    violations = [*_find_miscounted(schedule), *_find_stuck(schedule)]
    by_rank, by_stage = _count_peaks(schedule)
    return Proof(tuple(violations), sum(map(len, schedule.ranks)), by_rank, by_stage)


def _find_miscounted(schedule: PipelineSchedule) -> list[Violation]:
    """Actions that are missing, duplicated or on a wrong rank."""
    expected = set(schedule.expected())
    seen: Counter[Action] = Counter()
    stray: list[Violation] = []
    doubled: list[Violation] = []
    for rank, row in enumerate(schedule.ranks):
        for action in row:
            seen[action] += 1
            if action not in expected:
                stray.append(Violation(ViolationKind.STRAY, rank, action, "the schedule has no such action"))
            elif (home := schedule.rank_of(action.stage)) != rank:
                stray.append(Violation(ViolationKind.STRAY, rank, action, f"the stage is on rank {home}"))
            elif seen[action] == 2:
                doubled.append(Violation(ViolationKind.DOUBLED, rank, action, "occurs more than once"))
    missing = [
        Violation(ViolationKind.MISSING, schedule.rank_of(action.stage), action, "is missing")
        for action in sorted(expected - seen.keys(), key=lambda a: (a.micro_batch, a.stage, a.kind))
    ]
    return [found for kind in (missing, doubled, stray) for found in kind[:MAX_VIOLATIONS]]


def _find_stuck(schedule: PipelineSchedule) -> list[Violation]:
    """Ranks that cannot finish, and what each of them waits for."""
    positions = _run_untimed(schedule)
    violations = []
    for rank, position in enumerate(positions):
        row = schedule.ranks[rank]
        if position == len(row):
            continue
        action = row[position]
        needed = producer_of(action, schedule.stages)
        assert needed is not None, "an action that needs nothing never waits"
        kind, message = ViolationKind.DEADLOCK, f"waits for {needed}, "
        homes = [r for r, other in enumerate(schedule.ranks) if needed in other[positions[r] :]]
        if rank in homes:
            kind, message = ViolationKind.ORDER, f"comes before {needed}, which it needs"
        elif not homes:
            message += "which no rank runs"
        else:
            blocked = schedule.ranks[homes[0]][positions[homes[0]]]
            message += f"which rank {homes[0]} does not reach: it is blocked at {blocked}"
        violations.append(Violation(kind, rank, action, message))
    return violations


def _run_untimed(schedule: PipelineSchedule) -> list[int]:
    """The number of actions that each rank can run."""
    positions = [0] * len(schedule.ranks)
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    ready = list(range(len(schedule.ranks)))
    while ready:
        rank = ready.pop()
        row = schedule.ranks[rank]
        while positions[rank] < len(row):
            action = row[positions[rank]]
            needed = producer_of(action, schedule.stages)
            if needed is not None and needed not in done:
                waiting.setdefault(needed, []).append(rank)
                break
            done.add(action)
            positions[rank] += 1
            ready += waiting.pop(action, ())
    return positions


def _count_peaks(schedule: PipelineSchedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Peak in-flight activations, per rank and per stage.

    An activation lives from its forward pass to the end of the last pass that reads it: the backward pass; W
    in a split backward pass; in evaluation the forward pass itself.
    """
    release = schedule.kinds()[-1]
    ranks, stages, held = [], [0] * schedule.stages, [0] * schedule.stages
    for row in schedule.ranks:
        now = peak = 0
        for kind, stage, _ in row:
            if not 0 <= stage < schedule.stages:
                continue
            if kind is Kind.FORWARD:
                now += 1
                held[stage] += 1
                peak = max(peak, now)
                stages[stage] = max(stages[stage], held[stage])
            if kind is release:
                now -= 1
                held[stage] -= 1
        ranks.append(peak)
    return tuple(ranks), tuple(stages)
