"""The learning rate of every step: points by hand, continuity, and explanations of scaling."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.layout.lr_schedule import explain_lr, lr_at, scaled_lr
from meshwright.plan.build import build_plan
from meshwright.spec.job import Train

SCHEDULES = ("constant", "linear", "cosine", "wsd")


def make(schedule: str, **keys: object) -> Train:
    """110 steps with 10 steps of warm-up to a peak of 1."""
    return Train(**{"steps": 110, "global_batch": 1, "lr": 1.0, "warmup": 10, "schedule": schedule, **keys})


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        ("constant", {10: 1.0, 60: 1.0, 109: 1.0, 110: 1.0}),
        ("linear", {10: 1.0, 35: 0.775, 60: 0.55, 109: 0.109, 110: 0.1}),
        ("cosine", {10: 1.0, 35: 0.1 + 0.9 * (2 + 2**0.5) / 4, 60: 0.55, 110: 0.1}),
        ("wsd", {10: 1.0, 60: 1.0, 88: 1.0, 89: 1 - 0.9 / 22, 99: 0.55, 110: 0.1}),
    ],
)
def test_learning_rates_match_points_computed_by_hand(schedule, points):
    """Warm-up adds a tenth per step, then the schedule starts. wsd decays over the last 22 of 110 steps."""
    train = make(schedule)
    assert [lr_at(s, train) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert {s: lr_at(s, train) for s in points} == pytest.approx(points)


def test_min_lr_and_decay_fraction_come_from_the_job():
    train = make("wsd", min_lr_ratio=0.0, decay_fraction=0.5)
    assert [lr_at(s, train) for s in (54, 55, 82, 109)] == pytest.approx([1.0, 1.0, 28 / 55, 1 / 55])
    assert lr_at(110, make("linear", min_lr_ratio=0.5)) == pytest.approx(0.5)


@given(
    schedule=st.sampled_from(SCHEDULES),
    steps=st.integers(1, 400),
    warmup=st.integers(0, 200),
    fraction=st.floats(0.01, 1.0),
    floor=st.floats(0.0, 1.0),
)
def test_schedules_are_continuous_falling_after_warmup_and_bounded(schedule, steps, warmup, fraction, floor):
    """No two consecutive steps differ by more than the steepest slope."""
    own = {} if schedule == "constant" else {"min_lr_ratio": floor}
    own |= {"decay_fraction": fraction} if schedule == "wsd" else {}
    train = make(schedule, steps=steps, warmup=warmup, **own)
    fall = max(1, round(fraction * steps)) if schedule == "wsd" else max(1, steps - warmup)
    assume(schedule != "wsd" or warmup + fall <= steps)  # else refused: train-wsd-room
    rates = [lr_at(s, train) for s in range(steps + 1)]
    slope = max(1 / max(1, warmup), 1.6 / fall)  # a cosine is steepest in its middle, pi / 2
    assert all(abs(a - b) <= slope + 1e-9 for a, b in itertools.pairwise(rates))
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert all(0 <= rate <= 1 + 1e-9 for rate in rates)


def test_warm_up_longer_than_the_run_never_divides_by_zero():
    assert [lr_at(s, make("cosine", steps=2, warmup=5)) for s in (0, 1)] == pytest.approx([0.2, 0.4])


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_scaling_rules(rule, factor):
    base = None if rule == "none" else 8
    train = Train(steps=1, global_batch=32, lr=0.5, lr_scaling=rule, lr_base_batch=base)
    assert scaled_lr(train) == 0.5 * factor


def test_plan_explains_the_scaled_learning_rate(make_job):
    """The reasons have the numbers. Linear scaling without warm-up gets a warning."""
    scaling = {"lr": 3e-4, "lr_scaling": "linear", "lr_base_batch": 64, "global_batch": 256}
    plan, _ = build_plan(make_job(train=scaling))
    assert "lr 0.0003 x 4 = 0.0012: linear rule, global batch 256 over 64" in plan.reasons
    assert any(reason.startswith("warning: linear lr scaling without warm-up") for reason in plan.reasons)
    warmed, _ = build_plan(make_job(train={**scaling, "warmup": 2}))
    assert not any("warning" in reason for reason in warmed.reasons)


def test_only_a_raised_learning_rate_warns_about_missing_warmup():
    common = {"steps": 9, "lr": 1.0, "lr_base_batch": 8}
    assert explain_lr(Train(**common, global_batch=32, lr_scaling="sqrt")) == [
        "lr 1 x 2 = 2: square-root rule, global batch 32 over 8"
    ]
    assert len(explain_lr(Train(**common, global_batch=4, lr_scaling="linear"))) == 1
    assert explain_lr(Train(steps=9, global_batch=8)) == []
