"""The proof reports missing, repeated, stray and early actions, and deadlocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule.pipeline.actions import Action, Kind, PipelineSchedule
from meshwright.schedule.pipeline.build import build_schedule
from meshwright.schedule.pipeline.proof import MAX_VIOLATIONS, ViolationKind, prove_schedule
from meshwright.schedule.pipeline.walk import StageTimes, walk_schedule
from meshwright.spec.layout import SCHEDULES


def with_row(schedule: PipelineSchedule, rank: int, row: list[Action]) -> PipelineSchedule:
    """The schedule with another row of actions for a rank."""
    rows = list(schedule.ranks)
    rows[rank] = tuple(row)
    return replace(schedule, ranks=tuple(rows))


def violations_of(schedule: PipelineSchedule) -> dict[ViolationKind, list[tuple[int, Action]]]:
    """The violations of a schedule by kind."""
    named: dict[ViolationKind, list[tuple[int, Action]]] = {}
    for violation in prove_schedule(schedule).violations:
        named.setdefault(violation.kind, []).append((violation.rank, violation.action))
    return named


def test_missing_action_is_reported_with_the_waiting_ranks():
    good = build_schedule("1f1b", 3, 4)
    gone = Action(Kind.FORWARD, 1, 2)
    broken = with_row(good, 1, [a for a in good.ranks[1] if a != gone])
    named = violations_of(broken)
    assert named[ViolationKind.MISSING] == [(1, gone)]
    assert (2, Action(Kind.FORWARD, 2, 2)) in named[ViolationKind.DEADLOCK]
    says = [v.message for v in prove_schedule(broken).violations if v.rank == 2]
    assert says == ["waits for F(stage 1, micro-batch 2), which no rank runs"]


def test_missing_weight_gradient_is_reported_without_a_deadlock():
    good = build_schedule("zb-h1", 3, 4)
    gone = Action(Kind.WEIGHT, 2, 3)
    assert violations_of(with_row(good, 2, [a for a in good.ranks[2] if a != gone])) == {
        ViolationKind.MISSING: [(2, gone)]
    }


def test_repeated_action_is_reported_once():
    good = build_schedule("1f1b", 2, 3)
    twice = Action(Kind.BACKWARD, 0, 1)
    assert violations_of(with_row(good, 0, [*good.ranks[0], twice, twice])) == {
        ViolationKind.DOUBLED: [(0, twice)]
    }


@pytest.mark.parametrize(
    "action",
    [
        Action(Kind.FORWARD, 0, 9),
        Action(Kind.WEIGHT, 0, 0),
        Action(Kind.FORWARD, 99, 0),
        Action(Kind.BACKWARD, -3, 0),
    ],
)
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_stray_action_is_reported(name, action):
    good = build_schedule(name, 2, 3)
    if name == "zbv" and action.kind is Kind.WEIGHT:
        action = Action(Kind.WEIGHT, 0, 3)
    named = violations_of(with_row(good, 0, [*good.ranks[0], action]))
    assert named[ViolationKind.STRAY] == [(0, action)]


def test_action_on_the_wrong_rank_is_reported():
    good = build_schedule("gpipe", 2, 1)
    moved = Action(Kind.BACKWARD, 0, 0)
    broken = with_row(with_row(good, 0, [Action(Kind.FORWARD, 0, 0)]), 1, [*good.ranks[1], moved])
    assert violations_of(broken)[ViolationKind.STRAY] == [(1, moved)]


def test_backward_before_its_forward_is_an_order_violation():
    good = build_schedule("1f1b", 2, 2)
    row = list(good.ranks[1])
    row[0], row[1] = row[1], row[0]
    named = violations_of(with_row(good, 1, row))
    assert named[ViolationKind.ORDER] == [(1, Action(Kind.BACKWARD, 1, 0))]


def test_weight_gradient_before_its_backward_is_an_order_violation():
    good = build_schedule("zb-h1", 1, 1)
    forward, backward, weight = good.ranks[0]
    assert violations_of(with_row(good, 0, [forward, weight, backward]))[ViolationKind.ORDER] == [(0, weight)]


def test_ranks_that_wait_for_each_other_are_a_deadlock():
    """Each row alone is valid. Rank 0 waits for micro-batch 0, rank 1 runs micro-batch 1 first."""
    f, b = Kind.FORWARD, Kind.BACKWARD
    good = build_schedule("1f1b", 2, 2)
    upper = [Action(f, 0, 0), Action(b, 0, 0), Action(f, 0, 1), Action(b, 0, 1)]
    lower = [Action(f, 1, 1), Action(b, 1, 1), Action(f, 1, 0), Action(b, 1, 0)]
    broken = with_row(with_row(good, 0, upper), 1, lower)
    proof = prove_schedule(broken)
    assert violations_of(broken) == {ViolationKind.DEADLOCK: [(0, Action(b, 0, 0)), (1, Action(f, 1, 1))]}
    assert str(proof.violations[0]) == (
        "rank 0, B(stage 0, micro-batch 0): waits for B(stage 1, micro-batch 0), which rank 1 does not "
        "reach: it is blocked at F(stage 1, micro-batch 1)"
    )


def test_rank_without_actions_is_reported():
    good = build_schedule("1f1b", 2, 1)
    named = violations_of(replace(good, ranks=good.ranks[:1]))
    assert {rank for rank, _ in named[ViolationKind.MISSING]} == {1}
    assert named[ViolationKind.DEADLOCK] == [(0, Action(Kind.BACKWARD, 0, 0))]


def test_simulating_an_unproved_schedule_raises():
    good = build_schedule("1f1b", 2, 2)
    with pytest.raises(ValueError, match="prove the schedule first"):
        walk_schedule(with_row(good, 1, list(reversed(good.ranks[1]))), StageTimes())


def test_violations_are_limited():
    good = build_schedule("gpipe", 2, 100)
    violations = prove_schedule(replace(good, ranks=((), ()))).violations
    assert len(violations) == MAX_VIOLATIONS


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(SCHEDULES), pp=st.integers(2, 5), data=st.data())
def test_any_removed_action_is_reported_as_missing(name, pp, data):
    good = build_schedule(name, pp, 2 * pp)
    rank = data.draw(st.integers(0, pp - 1))
    row = list(good.ranks[rank])
    gone = row.pop(data.draw(st.integers(0, len(row) - 1)))
    assert violations_of(with_row(good, rank, row))[ViolationKind.MISSING] == [(rank, gone)]


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(SCHEDULES), pp=st.integers(1, 5), data=st.data())
def test_shuffled_row_is_proved_if_it_can_be_simulated(name, pp, data):
    """The proof of a randomly shuffled row agrees with the simulation."""
    good = build_schedule(name, pp, 2 * pp)
    rank = data.draw(st.integers(0, pp - 1))
    broken = with_row(good, rank, data.draw(st.permutations(good.ranks[rank])))
    proof = prove_schedule(broken)
    weights_late = ViolationKind.ORDER in {v.kind for v in proof.violations}
    try:
        walk_schedule(broken, StageTimes())
        walked = True
    except ValueError:
        walked = False
    assert walked == proof.proved or (walked and weights_late and broken.split_backward)


def test_in_flight_peaks_are_counted_by_rank_and_stage():
    proof = prove_schedule(build_schedule("interleaved", 2, 2, 2))
    assert proof.peak_in_flight == (4, 3)
    assert len(proof.peak_by_stage) == 4
    assert all(stage <= max(proof.peak_in_flight) for stage in proof.peak_by_stage)


def can_run(schedule: PipelineSchedule) -> bool:
    """Whether each action occurs once on its rank and the dependency graph has no cycle.

    This uses nothing of the proof: the dependencies are written again.
    """
    kinds, last = schedule.kinds(), schedule.stages - 1
    wanted = Counter(
        (home, Action(kind, stage, m))
        for stage, home in enumerate(schedule.stage_ranks)
        for kind in kinds
        for m in range(schedule.micro_batches)
    )
    if Counter((rank, a) for rank, row in enumerate(schedule.ranks) for a in row) != wanted:
        return False
    before: dict[Action, set[Action]] = {a: set() for row in schedule.ranks for a in row}
    for row in schedule.ranks:
        for earlier, later in pairwise(row):
            before[later].add(earlier)
    for kind, stage, m in before:
        needs = before[Action(kind, stage, m)]
        if kind is Kind.FORWARD and stage > 0:
            needs.add(Action(Kind.FORWARD, stage - 1, m))
        elif kind is Kind.BACKWARD:
            needs.add(Action(Kind.FORWARD, stage, m))
            needs |= {Action(Kind.BACKWARD, stage + 1, m)} if stage < last else set()
        elif kind is Kind.WEIGHT:
            needs.add(Action(Kind.BACKWARD, stage, m))
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return False
    return True


@pytest.mark.parametrize("mutation", ["swap", "drop", "double", "move", "exchange"])
@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(SCHEDULES), pp=st.integers(2, 4), data=st.data())
def test_mutated_schedule_is_proved_if_and_only_if_it_can_run(mutation, name, pp, data):
    """Actions are swapped, removed, repeated, moved to another rank or exchanged between ranks."""
    good = build_schedule(name, pp, 2 * pp)
    assert can_run(good)
    rows = [list(row) for row in good.ranks]
    one, other = data.draw(st.permutations(range(pp)))[:2]
    here = data.draw(st.integers(0, len(rows[one]) - 1))
    if mutation == "swap":
        there = min(len(rows[one]) - 1, here + data.draw(st.integers(1, 4)))
        rows[one][here], rows[one][there] = rows[one][there], rows[one][here]
    elif mutation == "drop":
        del rows[one][here]
    elif mutation == "double":
        rows[one].insert(data.draw(st.integers(here, len(rows[one]))), rows[one][here])
    else:
        there = data.draw(st.integers(0, len(rows[other]) - 1))
        if mutation == "move":
            rows[other].insert(there, rows[one].pop(here))
        else:
            rows[one][here], rows[other][there] = rows[other][there], rows[one][here]
    mutated = replace(good, ranks=tuple(map(tuple, rows)))
    assert prove_schedule(mutated).proved == can_run(mutated)


def test_mutations_give_valid_and_invalid_schedules():
    """Swapping neighbouring actions gives both kinds, so the test above can fail in both directions."""
    good = build_schedule("zbv", 3, 6)
    verdicts = Counter()
    for rank, row in enumerate(good.ranks):
        for n in range(len(row) - 1):
            swapped = [*row[:n], row[n + 1], row[n], *row[n + 2 :]]
            verdicts[prove_schedule(with_row(good, rank, swapped)).proved] += 1
    assert min(verdicts[True], verdicts[False]) > 5
