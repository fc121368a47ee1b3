"""Built schedules: proved for every size, with the published bubbles and peaks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import UserError
from meshwright.schedule.pipeline.actions import (
    Action,
    Kind,
    consumer_of,
    loop_ranks,
    producer_of,
    v_shaped_ranks,
)
from meshwright.schedule.pipeline.build import MAX_ACTIONS, build_schedule
from meshwright.schedule.pipeline.proof import prove_schedule
from meshwright.schedule.pipeline.walk import StageTimes, walk_schedule
from meshwright.spec.layout import SCHEDULES


def bubble_of(name: str, pp: int, micro_batches: int, virtual_stages: int | None = None) -> float:
    """The bubble of a schedule with equal stage times and no transfers."""
    schedule = build_schedule(name, pp, micro_batches, virtual_stages)
    return walk_schedule(schedule, StageTimes()).bubble


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(SCHEDULES),
    pp=st.integers(1, 10),
    groups=st.integers(1, 5),
    rest=st.integers(0, 9),
    virtual_stages=st.integers(2, 4),
)
def test_every_built_schedule_is_proved(name, pp, groups, rest, virtual_stages):
    interleaved = name == "interleaved"
    micro_batches = pp * groups if interleaved else groups + rest + (2 * pp if name == "dualpipe-v" else 0)
    schedule = build_schedule(name, pp, micro_batches, virtual_stages if interleaved else None)
    proof = prove_schedule(schedule)
    assert proof.violations == ()
    assert proof.actions == schedule.stages * micro_batches * len(schedule.kinds())


def test_one_micro_batch_on_four_stages_has_a_bubble_of_three_quarters():
    """Only one rank works at a time."""
    assert bubble_of("gpipe", 4, 1) == pytest.approx(0.75)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 2), (4, 8), (8, 64), (5, 3)])
def test_bubble_of_gpipe_and_1f1b_equals_the_formula(name, pp, micro_batches):
    assert bubble_of(name, pp, micro_batches) == pytest.approx((pp - 1) / (micro_batches + pp - 1))


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 8), (8, 32)])
def test_1f1b_has_at_most_pp_micro_batches_in_flight(pp, micro_batches):
    one = prove_schedule(build_schedule("1f1b", pp, micro_batches))
    all_first = prove_schedule(build_schedule("gpipe", pp, micro_batches))
    assert one.peak_in_flight == tuple(min(micro_batches, pp - rank) for rank in range(pp))
    assert all_first.peak_in_flight == (micro_batches,) * pp


@pytest.mark.parametrize("virtual_stages", [2, 3, 4])
def test_interleaving_divides_the_bubble_by_the_virtual_stages(virtual_stages):
    """The model is the same: each of v stages takes 1/v of the time."""
    plain = walk_schedule(build_schedule("1f1b", 4, 8), StageTimes())
    part = 1 / virtual_stages
    schedule = build_schedule("interleaved", 4, 8, virtual_stages)
    interleaved = walk_schedule(schedule, StageTimes(part, part, part))
    assert sum(interleaved.work_s) == pytest.approx(sum(plain.work_s))
    assert interleaved.bubble_overhead == pytest.approx(plain.bubble_overhead / virtual_stages)


def test_interleaving_has_more_activations_in_flight():
    """Rank 0 has more than pp micro-batches in flight, counted in activations of a whole rank."""
    proof = prove_schedule(build_schedule("interleaved", 4, 8, 2))
    assert proof.peak_in_flight[0] / 2 > 4


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 8), (4, 16), (8, 64)])
def test_bubbles_of_zb_h1_zbv_and_dualpipe_v(pp, micro_batches):
    """With equal F, B and W, ZB-H1 has a third of 1F1B's bubble.

    ZBV has only the wait of the last rank for its first input.
    """
    plain = walk_schedule(build_schedule("1f1b", pp, micro_batches), StageTimes())
    h1 = walk_schedule(build_schedule("zb-h1", pp, micro_batches), StageTimes())
    zbv = walk_schedule(build_schedule("zbv", pp, micro_batches), StageTimes(0.5, 0.5, 0.5))
    dual = walk_schedule(build_schedule("dualpipe-v", pp, micro_batches), StageTimes(0.5, 0.5, 0.5))
    assert h1.makespan_s - max(h1.work_s) == pytest.approx((plain.makespan_s - max(plain.work_s)) / 3)
    assert zbv.makespan_s - max(zbv.work_s) == pytest.approx((pp - 1) * 0.5)
    assert dual.makespan_s == pytest.approx(zbv.makespan_s)


def test_zbv_and_dualpipe_v_have_a_bubble_below_2_percent():
    """The size is 64 micro-batches on 8 ranks, where 1F1B has 10%."""
    plain, zbv, dual = (
        walk_schedule(build_schedule(name, 8, 64), StageTimes()).bubble
        for name in ("1f1b", "zbv", "dualpipe-v")
    )
    assert plain == pytest.approx(7 / 71)
    assert max(zbv, dual) < 0.02


def test_dualpipe_v_peak_is_half_a_micro_batch_above_1f1b():
    proof = prove_schedule(build_schedule("dualpipe-v", 6, 24))
    assert [peak / 2 for peak in proof.peak_in_flight] == [6.5] * 6


@pytest.mark.parametrize("name", ["zb-h1", "zbv"])
def test_zero_bubble_peak_equals_rank_0_of_1f1b(name):
    proof = prove_schedule(build_schedule(name, 6, 24))
    per_rank = 2 if name == "zbv" else 1
    assert max(proof.peak_in_flight) / per_rank == 6


def test_1f1b_order_on_the_middle_rank():
    row = build_schedule("1f1b", 3, 4).ranks[1]
    assert " ".join(f"{a.kind}{a.micro_batch}" for a in row) == "F0 F1 B0 F2 B1 F3 B2 B3"


def test_interleaved_runs_groups_of_pp_micro_batches_per_stage():
    row = build_schedule("interleaved", 2, 4, 2).ranks[0]
    forwards = [(a.stage, a.micro_batch) for a in row if a.kind is Kind.FORWARD]
    assert forwards == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)]


def test_v_schedule_has_first_and_last_stage_on_rank_0():
    assert v_shaped_ranks(3) == (0, 1, 2, 2, 1, 0)
    assert loop_ranks(3, 2) == (0, 1, 2, 0, 1, 2)
    zbv = build_schedule("zbv", 3, 6)
    assert (zbv.pp, zbv.stages, zbv.virtual_stages) == (3, 6, 2)
    assert (zbv.stages_of(0), zbv.stages_of(2)) == ((0, 5), (2, 3))
    assert [zbv.rank_of(stage) for stage in range(6)] == list(v_shaped_ranks(3))


@pytest.mark.parametrize("name", SCHEDULES)
def test_consumer_of_is_the_inverse_of_producer_of(name):
    """Producer and consumer are the same pairs, read from either end."""
    schedule = build_schedule(name, 3, 6)
    pairs = {(producer_of(a, schedule.stages), a) for row in schedule.ranks for a in row}
    sent = {(p, a) for p, a in pairs if p is not None and p.stage != a.stage}
    mirrored = {(a, consumer_of(a, schedule.stages)) for row in schedule.ranks for a in row}
    assert {pair for pair in mirrored if pair[1] is not None} == sent


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("interleaved", 4, 6, 2), "schedule-micro-batches", "Use 4 or 8"),
        (("interleaved", 4, 3, 2), "schedule-micro-batches", "Use 4."),
        (("interleaved", 4, 8, 1), "schedule-virtual-stages", "Use 2 or more, or 1f1b"),
        (("1f1b", 4, 8, 2), "schedule-virtual-stages", "each rank has one stage"),
        (("zbv", 4, 8, 3), "schedule-virtual-stages", "Use 2"),
        (("dualpipe-v", 4, 7), "schedule-micro-batches", "Use 8 or more"),
        (("dualpipe-v", 4, 8, 1), "schedule-virtual-stages", "Use 2"),
        (("dapple", 4, 8), "schedule-unknown", "Use gpipe, 1f1b"),
        (("1f1b", 0, 8), "schedule-size", "stages=0"),
        (("1f1b", 4, 0), "schedule-size", "micro_batches=0"),
        (("gpipe", 1000, MAX_ACTIONS), "schedule-size", "Use 2000 or fewer"),
    ],
)
def test_invalid_sizes_are_refused_with_valid_ones(arguments, code, says):
    with pytest.raises(UserError) as refused:
        build_schedule(*arguments)
    (problem,) = refused.value.problems
    assert problem.code == code
    assert says in str(problem)


def test_action_as_a_string():
    assert str(Action(Kind.BACKWARD, 3, 7)) == "B(stage 3, micro-batch 7)"
