"""A grace that is shorter than a step is reported once."""

from __future__ import annotations

from meshwright.train.stop_signal import StopGrace


def test_the_first_step_that_takes_longer_than_the_grace_is_reported():
    grace = StopGrace(10.0)
    assert [grace.is_newly_exceeded(step_s) for step_s in (9.0, 10.0, 11.0, 12.0, 9.0)] == [
        False,
        False,
        True,
        False,
        False,
    ]
