"""Rows of the scaling table from given times."""

from __future__ import annotations

import dataclasses

from meshwright.report.scaling import WARM_UP, build_row, scaling_chart

SLOW = [99.0] * WARM_UP
"""The warm-up must not count."""


def times(steps, buckets=None):
    """The report of a rank: its step times, and in each step the same buckets as (ready, reduced)."""
    made = [buckets or [] for _ in range(len(steps))]
    return {"step_s": [*SLOW, *steps], "buckets": [*([[(0.0, 99.0)] * len(buckets or [])] * WARM_UP), *made]}


def test_overlap_is_the_hidden_share_of_communication(plan):
    """The last bucket is ready at 4 s and reduced at 5 s. Of 4 s of communication 1 s is exposed."""
    rank = times([10.0] * 3, [(1.0, 4.0), (4.0, 5.0)])
    row = build_row(plan, [rank, rank], 256, True, None)
    assert (row.step_s, row.communication_s, row.exposed_s, row.overlap) == (10.0, 4.0, 1.0, 0.75)
    assert (row.tokens_per_s, row.ranks, row.audit_ok, row.shared_cores) == (25.6, 2, True, False)
    assert (row.overlap_low, row.overlap_high) == (0.75, 0.75)


def test_single_bucket_has_no_overlap(plan):
    """It is ready at the end of the backward pass."""
    rank = times([10.0] * 3, [(4.0, 5.0)])
    assert build_row(plan, [rank, rank], 256, True, None).overlap == 0.0


def test_concurrent_reductions_count_once(plan):
    rank = times([10.0] * 3, [(0.0, 3.0), (1.0, 2.0), (1.5, 4.0)])
    row = build_row(plan, [rank, rank], 256, True, None)
    assert (row.communication_s, row.exposed_s) == (4.0, 2.5)


def test_waiting_for_a_late_rank_is_not_communication(plan):
    """The early rank sends at 1 s, the late one at 3 s, and both finish at 4 s: communication took 1 s."""
    early, late = times([10.0] * 3, [(1.0, 4.0)]), times([10.0] * 3, [(3.0, 4.0)])
    row = build_row(plan, [early, late], 256, True, None)
    assert (row.communication_s, row.exposed_s) == (1.0, 1.0)


def test_step_time_is_that_of_the_slowest_rank(plan):
    quick, slow = times([1.0, 9.0, 1.0]), times([5.0, 1.0, 5.0])
    assert build_row(plan, [quick, slow], 256, True, None).step_s == 5.0


def test_speedup_and_efficiency_are_relative_to_the_first_row(plan):
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
