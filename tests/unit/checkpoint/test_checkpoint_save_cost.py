"""What a save costs training is measured by step times; ``checkpoint.auto`` follows large changes only."""

from __future__ import annotations

import pytest

from meshwright.checkpoint.save_cost import RETRY_S, STEPS_BEFORE_FIRST_SAVE, AutoInterval, StepTimes
from meshwright.layout.checkpoint_interval import FailureRate, SaveCost, daly_interval_s

BETWEEN_S = 10_000.0


@pytest.fixture
def auto() -> AutoInterval:
    return AutoInterval(FailureRate(BETWEEN_S, "1 node", "measured"))


def test_steps_during_a_write_are_compared_with_those_outside():
    times = StepTimes()
    for step_s in (1.0, 1.0, 5.0, 1.0):
        times.add(step_s, during_write=False)
    for step_s in (1.5, 1.5, 1.0):
        times.add(step_s, during_write=True)
    found = times.end_write()
    assert (found.factor, found.seconds) == (1.5, 1.5), "three steps, each half a second longer"
    assert times.counted == 4
    assert times.end_write().factor is None, "no step since"


@pytest.mark.parametrize(("outside", "during"), [([], [1.0]), ([1.0], []), ([], [])])
def test_without_steps_to_compare_there_is_no_factor(outside, during):
    times = StepTimes()
    for step_s in outside:
        times.add(step_s, during_write=False)
    for step_s in during:
        times.add(step_s, during_write=True)
    assert (times.end_write().factor, times.end_write().seconds) == (None, 0.0)


def test_faster_steps_during_a_write_cost_nothing():
    times = StepTimes()
    times.add(2.0, during_write=False)
    times.add(1.0, during_write=True)
    found = times.end_write()
    assert (found.factor, found.seconds) == (0.5, 0.0)


def test_the_first_save_is_early_and_the_next_after_the_interval(auto):
    assert not auto.is_due(1e9, has_saved=False, steps=STEPS_BEFORE_FIRST_SAVE - 1)
    assert auto.is_due(0.1, has_saved=False, steps=STEPS_BEFORE_FIRST_SAVE)
    assert not auto.is_due(RETRY_S - 1, has_saved=True, steps=1000), "the first one is not committed yet"
    assert auto.is_due(RETRY_S, has_saved=True, steps=1000)
    choice = auto.measure(SaveCost(1.0, 1.0, 3.0))
    assert choice is not None
    assert choice.interval_s == daly_interval_s(2.0, BETWEEN_S)
    assert not auto.is_due(choice.interval_s - 1, has_saved=True, steps=1000)
    assert auto.is_due(choice.interval_s, has_saved=True, steps=1000)


def test_the_interval_changes_when_saves_take_much_longer_for_good(auto):
    """One slow save among five is an outlier; a small change is not reported."""
    assert auto.measure(SaveCost(1.0, 1.0, 3.0)) is not None
    for blocked_s in (1.2, 0.9, 50.0, 1.1):
        assert auto.measure(SaveCost(blocked_s, 1.0, 3.0)) is None
    found = [auto.measure(SaveCost(50.0, 1.0, 60.0)) for _ in range(3)]
    changed = [choice for choice in found if choice is not None]
    assert len(changed) == 1
    assert changed[0].interval_s == daly_interval_s(51.0, BETWEEN_S)
