"""The forward-only order of an evaluation: proved for any placement of stages, with the shortest time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule.pipeline.actions import Action, Kind, PipelineSchedule
from meshwright.schedule.pipeline.build import build_schedule
from meshwright.schedule.pipeline.forward_only import order_forward
from meshwright.schedule.pipeline.proof import ViolationKind, prove_schedule
from meshwright.schedule.pipeline.walk import StageTimes, walk_schedule
from meshwright.spec.layout import SCHEDULES


@settings(max_examples=60, deadline=None)
@given(homes=st.lists(st.integers(0, 3), min_size=1, max_size=8), micro_batches=st.integers(1, 9))
def test_forward_order_is_proved_for_any_stage_placement(homes, micro_batches):
    names = sorted(set(homes))
    schedule = PipelineSchedule("any", 1, tuple(names.index(home) for home in homes), (), False)
    order = order_forward(schedule, micro_batches)
    proof = prove_schedule(order)
    assert proof.violations == ()
    assert proof.actions == len(homes) * micro_batches
    assert {a.kind for row in order.ranks for a in row} == {Kind.FORWARD}
    assert set(proof.peak_in_flight) == {1}, "activations are not kept for a backward pass"


@pytest.mark.parametrize("name", SCHEDULES)
def test_forward_order_keeps_the_ranks_of_the_stages(name):
    schedule = build_schedule(name, 4, 8)
    order = order_forward(schedule, 3)
    assert order.stage_ranks == schedule.stage_ranks
    assert (order.micro_batches, order_forward(schedule).micro_batches) == (3, 8)
    assert all(schedule.rank_of(a.stage) == rank for rank, row in enumerate(order.ranks) for a in row)


@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 3), (4, 1), (4, 8), (8, 3)])
def test_forward_time_is_micro_batches_plus_pp_minus_1(pp, micro_batches):
    """The last micro-batch starts after all others and then passes all stages."""
    walk = walk_schedule(order_forward(build_schedule("1f1b", pp, micro_batches)), StageTimes())
    assert walk.makespan_s == micro_batches + pp - 1


def test_missing_forward_and_stray_backward_are_reported():
    order = order_forward(build_schedule("1f1b", 2, 2))
    short = replace(order, ranks=(order.ranks[0], order.ranks[1][:-1]))
    (missing,) = prove_schedule(short).violations
    assert (missing.kind, missing.action) == (ViolationKind.MISSING, Action(Kind.FORWARD, 1, 1))
    longer = replace(order, ranks=(order.ranks[0], (*order.ranks[1], Action(Kind.BACKWARD, 1, 0))))
    (stray,) = prove_schedule(longer).violations
    assert (stray.kind, stray.rank) == (ViolationKind.STRAY, 1)
