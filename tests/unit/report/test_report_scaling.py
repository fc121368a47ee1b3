"""Rows of the scaling table from times that are known."""

from __future__ import annotations

import dataclasses

from meshwright.report.scaling import WARM_UP, build_row, scaling_chart

SLOW = [99.0] * WARM_UP
"""The warm-up must not count."""


def times(steps, buckets=None):
    """What a rank reports: its steps, and of each the same buckets as (ready, reduced)."""
    made = [buckets or [] for _ in range(len(steps))]
    return {"step_s": [*SLOW, *steps], "buckets": [*([[(0.0, 99.0)] * len(buckets or [])] * WARM_UP), *made]}


def test_overlap_is_the_share_that_ends_before_the_backward_pass_does(plan):
    """Two buckets of 2 s each; the last is ready at 4 and reduced at 5: of 4 s under way, 1 is exposed."""
    rank = times([10.0] * 3, [(1.0, 4.0), (4.0, 5.0)])
    row = build_row(plan, [rank, rank], 256, True, None)
    assert (row.step_s, row.communication_s, row.exposed_s, row.overlap) == (10.0, 4.0, 1.0, 0.75)
    assert (row.tokens_per_s, row.ranks, row.audit_ok, row.shared_cores) == (25.6, 2, True, False)
    assert (row.overlap_low, row.overlap_high) == (0.75, 0.75)


def test_one_bucket_hides_nothing(plan):
    """It is ready when the backward pass is over."""
    rank = times([10.0] * 3, [(4.0, 5.0)])
    assert build_row(plan, [rank, rank], 256, True, None).overlap == 0.0


def test_reductions_side_by_side_count_once(plan):
    rank = times([10.0] * 3, [(0.0, 3.0), (1.0, 2.0), (1.5, 4.0)])
    row = build_row(plan, [rank, rank], 256, True, None)
    assert (row.communication_s, row.exposed_s) == (4.0, 2.5)


def test_waiting_for_a_late_rank_is_not_communication(plan):
    """The early rank sends at 1, the late one at 3, both have the sum at 4: one second was needed."""
    early, late = times([10.0] * 3, [(1.0, 4.0)]), times([10.0] * 3, [(3.0, 4.0)])
    row = build_row(plan, [early, late], 256, True, None)
    assert (row.communication_s, row.exposed_s) == (1.0, 1.0)


def test_the_slowest_rank_of_each_step_counts(plan):
    quick, slow = times([1.0, 9.0, 1.0]), times([5.0, 1.0, 5.0])
    assert build_row(plan, [quick, slow], 256, True, None).step_s == 5.0


def test_speed_up_and_efficiency_are_against_the_first_row(plan):
    alone = dataclasses.replace(
        plan, job=dataclasses.replace(plan.job, layout=dataclasses.replace(plan.job.layout, dp_replicate=1))
    )
    base = build_row(alone, [times([16.0] * 3)], 256, True, None)
    assert (base.ranks, base.speedup, base.efficiency, base.overlap) == (1, 1.0, 1.0, None)
    rank = times([10.0] * 3, [(1.0, 4.0), (4.0, 5.0)])
    row = build_row(plan, [rank, rank], 256, True, base)
    assert (row.speedup, row.efficiency) == (1.6, 0.8)
    ideal, measured = scaling_chart([base, row], weak=False).series
    assert list(ideal.points()) == [(1.0, 1.0), (2.0, 2.0)]
    assert list(measured.points()) == [(1.0, 1.0), (2.0, 1.6)]
