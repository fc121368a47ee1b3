"""Proves that a schedule runs: everything once, nothing before what it needs, no rank waiting for ever.

All ranks are walked together without times: each goes on until its next action needs a result that is not
there. What remains when no rank can go on is a deadlock, whatever the times would have been; if nothing
remains, every order in which the ranks may happen to run is fine, because results are waited for, never
taken. Peaks are counted along each rank's own order, and do not depend on times either.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from meshwright.schedule.pipeline.actions import Action, Kind, PipelineSchedule, producer_of

MAX_VIOLATIONS = 20
"""Of each kind; one mistake in a generator breaks every micro-batch."""


class ViolationKind(StrEnum):
    """What can be wrong with a schedule."""

    MISSING = "missing"
    """An action that must be there is not."""
    DOUBLED = "doubled"
    """An action is there more than once."""
    STRAY = "stray"
    """An action of a stage, micro-batch or kind that the schedule does not have, or on the wrong rank."""
    ORDER = "order"
    """A rank runs an action before another of its own that it needs."""
    DEADLOCK = "deadlock"
    """A rank waits for a result that never comes."""


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong, with the place."""

    breach: ViolationKind
    rank: int
    action: Action
    says: str
    """In words, without rank and action."""

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.action}: {self.says}"


@dataclass(frozen=True)
class Proof:
    """What is known of a schedule without any times."""

    violations: tuple[Violation, ...]
    """None if the schedule is proved."""
    actions: int
    """How many were checked."""
    peak_in_flight: tuple[int, ...]
    """Most activations of one stage and micro-batch that a rank holds at once, a rank each."""
    peak_by_stage: tuple[int, ...]
    """The same of each stage alone."""

    @property
    def proved(self) -> bool:
        """Whether nothing is wrong."""
        return not self.violations


def prove_schedule(schedule: PipelineSchedule) -> Proof:
    """Check a schedule; what is wrong with it is returned, never raised."""
    violations = [*_find_miscounted(schedule), *_find_stuck(schedule)]
    by_rank, by_stage = _count_peaks(schedule)
    return Proof(tuple(violations), sum(map(len, schedule.ranks)), by_rank, by_stage)


def _find_miscounted(schedule: PipelineSchedule) -> list[Violation]:
    """Actions that are missing, doubled or not the rank's own."""
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
                doubled.append(Violation(ViolationKind.DOUBLED, rank, action, "is there more than once"))
    missing = [
        Violation(ViolationKind.MISSING, schedule.rank_of(action.stage), action, "is not there")
        for action in sorted(expected - seen.keys(), key=lambda a: (a.micro_batch, a.stage, a.kind))
    ]
    return [found for kind in (missing, doubled, stray) for found in kind[:MAX_VIOLATIONS]]


def _find_stuck(schedule: PipelineSchedule) -> list[Violation]:
    """Ranks that do not come to their end, and what each of them waits for."""
    positions = _run_untimed(schedule)
    violations = []
    for rank, position in enumerate(positions):
        row = schedule.ranks[rank]
        if position == len(row):
            continue
        action = row[position]
        needed = producer_of(action, schedule.stages)
        assert needed is not None, "an action that needs nothing never waits"
        breach, says = ViolationKind.DEADLOCK, f"waits for {needed}, "
        homes = [r for r, other in enumerate(schedule.ranks) if needed in other[positions[r] :]]
        if rank in homes:
            breach, says = ViolationKind.ORDER, f"comes before {needed}, which it needs"
        elif not homes:
            says += "which no rank runs"
        else:
            blocked = schedule.ranks[homes[0]][positions[homes[0]]]
            says += f"which rank {homes[0]} does not reach: it stands before {blocked}"
        violations.append(Violation(breach, rank, action, says))
    return violations


def _run_untimed(schedule: PipelineSchedule) -> list[int]:
    """How far each rank comes."""
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
    """Most activations held at once, by rank and by stage.

    Held from a forward pass to the end of the last pass that reads them: the backward pass; where that is
    split, W; where there is none, the forward pass itself.
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
