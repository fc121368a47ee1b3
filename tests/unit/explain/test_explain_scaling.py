"""Rows of the scaling table from times that are known."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.explain.scaling import WARM_UP, build_row, scaling_chart

SLOW = [99.0] * WARM_UP
"""The warm-up must not count."""


def times(normal, unreduced=(), reductions=()):
    return {
        "normal_s": [*SLOW, *normal],
        "unreduced_s": [*SLOW, *unreduced] if unreduced else [],
        "reductions_s": [*SLOW, *reductions] if reductions else [],
    }


def test_overlap_is_what_the_step_does_not_pay_for(plan):
    """Reductions of 4 s alone add 1 s to the step: three quarters are hidden."""
    rank = times([10.0, 10.0, 10.0], [9.0, 9.0, 9.0], [4.0, 4.0, 4.0])
    row = build_row(plan, [rank, rank], 256, True, None)
    assert (row.step_s, row.communication_s, row.exposed_s, row.overlap) == (10.0, 4.0, 1.0, 0.75)
    assert (row.tokens_per_s, row.ranks, row.audit_ok, row.shared_cores) == (25.6, 2, True, False)
    assert (row.overlap_low, row.overlap_high) == (0.75, 0.75)


def test_drift_cancels_between_the_parts_of_a_round(plan):
    """The machine becomes ten times slower half-way; the difference of a round stays the same."""
    normal, unreduced = [10.0, 100.0, 10.0, 100.0, 100.0], [9.0, 99.0, 9.0, 99.0, 99.0]
    rank = times(normal, unreduced, [4.0] * 5)
    assert build_row(plan, [rank, rank], 256, True, None).overlap == 0.75


@pytest.mark.parametrize(("unreduced", "overlap"), [(11.0, 1.0), (2.0, 0.0)])
def test_noise_does_not_leave_the_range_of_a_share(plan, unreduced, overlap):
    rank = times([10.0] * 3, [unreduced] * 3, [4.0] * 3)
    row = build_row(plan, [rank, rank], 256, True, None)
    assert row.overlap == overlap
    assert row.exposed_s >= 0


def test_an_overlap_that_is_lost_in_noise_is_marked(plan):
    steady = times([10.0] * 4, [9.0] * 4, [4.0] * 4)
    wild = times([10.0, 12.0, 8.0, 14.0], [9.0] * 4, [4.0] * 4)
    assert not build_row(plan, [steady, steady], 256, True, None).noisy
    assert build_row(plan, [wild, wild], 256, True, None).noisy


def test_the_slowest_rank_of_each_round_counts(plan):
    quick = times([1.0, 9.0, 1.0], [1.0, 8.0, 1.0], [1.0] * 3)
    slow = times([5.0, 1.0, 5.0], [4.0, 1.0, 4.0], [2.0] * 3)
    row = build_row(plan, [quick, slow], 256, True, None)
    assert (row.step_s, row.communication_s) == (5.0, 2.0)


def test_speed_up_and_efficiency_are_against_the_first_row(plan):
    alone = dataclasses.replace(
        plan, job=dataclasses.replace(plan.job, layout=dataclasses.replace(plan.job.layout, dp_replicate=1))
    )
    base = build_row(alone, [times([16.0] * 3)], 256, True, None)
    assert (base.ranks, base.speedup, base.efficiency, base.overlap) == (1, 1.0, 1.0, None)
    rank = times([10.0] * 3, [9.0] * 3, [4.0] * 3)
    row = build_row(plan, [rank, rank], 256, True, base)
    assert (row.speedup, row.efficiency) == (1.6, 0.8)
    ideal, measured = scaling_chart([base, row], weak=False).series
    assert list(ideal.points()) == [(1.0, 1.0), (2.0, 2.0)]
    assert list(measured.points()) == [(1.0, 1.0), (2.0, 1.6)]
