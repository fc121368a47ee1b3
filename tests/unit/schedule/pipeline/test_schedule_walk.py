"""The simulation: times of small schedules by hand, uneven stages, transfers and idle time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule.pipeline.actions import producer_of
from meshwright.schedule.pipeline.build import build_schedule
from meshwright.schedule.pipeline.walk import StageTimes, walk_schedule
from meshwright.spec.layout import SCHEDULES


def test_two_ranks_and_two_micro_batches_by_hand():
    """F takes 1 and B takes 2. Rank 0 runs F0 F1, waits, then B0 B1. Rank 1 runs F0 B0 F1 B1."""
    walk = walk_schedule(build_schedule("1f1b", 2, 2), StageTimes(1.0, 1.5, 0.5))
    assert walk.start_s == ((0, 1, 4, 7), (1, 2, 4, 5))
    assert walk.end_s == ((1, 2, 6, 9), (2, 4, 5, 7))
    assert walk.makespan_s == 9
    assert walk.work_s == (6, 6)
    assert walk.idle_s == (3, 3)
    assert walk.bubble == pytest.approx(1 / 3)
    assert walk.bubble_overhead == pytest.approx(1 / 2)


def test_transfer_delays_the_receiver_and_without_overlap_the_sender():
    schedule = build_schedule("gpipe", 2, 2)
    free = walk_schedule(schedule, StageTimes(1.0, 1.0, 0.0), 0.25)
    blocked = walk_schedule(schedule, StageTimes(1.0, 1.0, 0.0), 0.25, overlap=False)
    assert free.start_s[0][:2] == (0, 1)
    assert blocked.start_s[0][:2] == (0, 1.25)
    assert free.start_s[1][0] == blocked.start_s[1][0] == 1.25
    assert blocked.makespan_s == free.makespan_s + 0.5


def test_stages_on_one_rank_need_no_transfer():
    """In this V schedule stages 1 and 2 are both on rank 1."""
    walk = walk_schedule(build_schedule("zbv", 2, 1), StageTimes(), 10.0)
    assert walk.start_s[1][:2] == (11, 12)


def test_each_stage_boundary_may_have_its_own_transfer_time():
    walk = walk_schedule(build_schedule("gpipe", 3, 1), StageTimes(1.0, 1.0, 0.0), [0.5, 2.0])
    assert [row[0] for row in walk.start_s] == [0.0, 1.5, 4.5]
    assert walk.makespan_s == 6 + 2 * 2.5


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_slowest_stage_determines_the_time(name):
    """The last stage takes three times as long. The time is one fill and drain plus its remaining work."""
    times = StageTimes([1, 1, 3], [1, 1, 3], np.array([1.0, 1.0, 3.0]))
    walk = walk_schedule(build_schedule(name, 3, 10), times)
    assert walk.makespan_s == pytest.approx((3 + 3 + 9) + 9 * 9)
    assert walk.work_s == (30, 30, 90)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(SCHEDULES),
    pp=st.integers(1, 5),
    groups=st.integers(1, 3),
    overlap=st.booleans(),
    data=st.data(),
)
def test_no_action_starts_before_its_input_arrives(name, pp, groups, overlap, data):
    schedule = build_schedule(name, pp, pp * (groups + (name == "dualpipe-v")))
    draw = st.lists(st.floats(0.1, 3.0), min_size=schedule.stages, max_size=schedule.stages)
    times = StageTimes(data.draw(draw), data.draw(draw), data.draw(draw))
    transfer = data.draw(st.floats(0.0, 1.0))
    walk = walk_schedule(schedule, times, transfer, overlap)
    started, ended = {}, {}
    for row, starts, ends in zip(schedule.ranks, walk.start_s, walk.end_s, strict=True):
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False)), (
            "actions of a rank overlap"
        )
        started |= dict(zip(row, starts, strict=True))
        ended |= dict(zip(row, ends, strict=True))
    for action in started:
        needed = producer_of(action, schedule.stages)
        if needed is not None:
            away = schedule.rank_of(needed.stage) != schedule.rank_of(action.stage)
            assert started[action] >= ended[needed] + transfer * away
    assert walk.makespan_s >= max(walk.work_s) - 1e-9


def test_stage_times_of_the_wrong_length_raise():
    with pytest.raises(ValueError, match=r"forward_s has the shape \(2,\); give one number, or 3"):
        walk_schedule(build_schedule("1f1b", 3, 3), StageTimes([1.0, 2.0]))
