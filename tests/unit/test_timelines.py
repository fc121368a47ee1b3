"""Pipeline schedules of the API: generated, proved, simulated, written and read again."""

from __future__ import annotations

import dataclasses

import pytest

import meshwright as mw


def test_a_simulated_schedule_has_the_bubble_of_the_formula_and_its_peaks():
    found = mw.simulate_schedule(mw.build_schedule("1f1b", pp=4, micro_batches=8))
    assert found.bubble == pytest.approx(3 / 11)
    assert found.makespan_s == found.predicted_s == 33
    assert found.proof.peak_in_flight == (4, 3, 2, 1)


def test_a_written_schedule_is_read_again_without_a_closed_form(tmp_path):
    found = mw.simulate_schedule(mw.build_schedule("zbv"), transfer_s=0.25, overlap=False)
    found.write(tmp_path / "mine.csv")
    again = mw.simulate_schedule(mw.load_schedule(tmp_path / "mine.csv"), transfer_s=0.25, overlap=False)
    assert again.walk == found.walk
    assert found.predicted_s is not None
    assert again.predicted_s is None


def test_times_may_be_given_for_each_stage():
    found = mw.simulate_schedule(
        mw.build_schedule("gpipe", pp=2, micro_batches=1), forward_s=[1, 3], backward_input_s=[2, 4]
    )
    assert found.makespan_s == 1 + 3 + (4 + 1) + (2 + 1)
    assert found.predicted_s is None


@pytest.mark.parametrize(
    "times", [{"forward_s": [1, 2, 3]}, {"transfer_s": -1.0}, {"backward_weight_s": [1, float("nan")]}]
)
def test_bad_times_are_refused(times):
    with pytest.raises(mw.UserError) as caught:
        mw.simulate_schedule(mw.build_schedule("1f1b", pp=2, micro_batches=2), **times)
    assert [problem.code for problem in caught.value.problems] == ["api-argument"]


def test_a_schedule_with_a_deadlock_is_not_proved():
    schedule = mw.build_schedule("1f1b", pp=2, micro_batches=2)
    backward_first = dataclasses.replace(schedule, ranks=(schedule.ranks[0], schedule.ranks[1][::-1]))
    with pytest.raises(mw.CheckFailedError) as caught:
        mw.prove_schedule(backward_first)
    assert {problem.code for problem in caught.value.problems} == {"schedule-not-proved"}
