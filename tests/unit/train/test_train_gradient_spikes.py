"""Gradient spikes: which norms are reported, and how often."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from meshwright.train import gradient_spikes
from meshwright.train.gradient_spikes import MIN_STEPS, SPIKE_FACTOR, WINDOW, GradientSpikes


@pytest.fixture
def report(monkeypatch):
    """``report(norms)``: the steps, from 1, at which a run with these gradient norms has an event."""
    monkeypatch.setattr(gradient_spikes, "_name_ranks", lambda trainer, limit: ([], None))

    def run(norms):
        found = []
        events = SimpleNamespace(write=lambda _, step, **__: found.append(step))
        trainer = SimpleNamespace(mesh=SimpleNamespace(rank=0), events=events, step=0)
        spikes = GradientSpikes()
        for norm in norms:
            trainer.step += 1
            spikes.check(trainer, norm)
        return found

    return run


def test_a_norm_far_above_the_median_is_reported(report):
    usual = [2.0, 1.0, 3.0] * 4
    assert report([*usual, 1.01 * SPIKE_FACTOR * 2.0, 2.0]) == [13]
    assert report([*usual, 0.99 * SPIKE_FACTOR * 2.0, 2.0]) == []


def test_the_first_steps_and_norms_of_zero_have_no_median(report):
    assert report([1.0] * (MIN_STEPS - 1) + [1e9]) == []
    assert report([0.0] * 20 + [1e9]) == []


def test_norms_that_are_not_finite_are_another_error(report):
    assert report([1.0] * 20 + [math.inf, math.nan, 1.0]) == []


def test_norms_that_stay_large_are_reported_once(report):
    assert report([1.0] * WINDOW + [1e9] * (3 * WINDOW)) == [WINDOW + 1]
