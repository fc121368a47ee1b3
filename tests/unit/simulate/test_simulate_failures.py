"""The simulator against closed forms, a step-by-step reference and published runs."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from meshwright.layout.checkpoint_interval import daly_interval_s, lost_share
from meshwright.simulate.choices import best_interval, best_spares, try_intervals, try_spares
from meshwright.simulate.failures import (
    KINDS,
    LOSSES,
    FailureModel,
    draw_failures,
    evaluate,
    find_downtime,
    simulate,
)

HOUR, DAY = 3600.0, 86_400.0
SOFTWARE_ONLY = {"software": 1 / (10 * HOUR)}


def model_of(**changes) -> FailureModel:
    """Failures of software every 10 h: no repairs, so the assumptions of Young and Daly hold."""
    plain = FailureModel(
        wall_s=300 * DAY, nodes=64, rates_per_s=SOFTWARE_ONLY, detect_s=5.0, restart_s=200.0, load_s=95.0,
        save_s=20.0, interval_s=1200.0, repair_s=DAY, spares=0,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def exact_goodput(model: FailureModel) -> float:
    """The exact expectation with failures also in saves and restarts (Daly 2006, complete model).

    tau / (M e^(R/M) (e^((tau + d) / M) - 1))
    """
    between, restore = model.between_s, model.detect_s + model.restart_s + model.load_s
    cycle = model.interval_s + model.save_s
    return model.interval_s / (between * math.exp(restore / between) * math.expm1(cycle / between))


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


@pytest.mark.parametrize("changes", [{}, {"save_s": 200.0, "interval_s": 4 * HOUR}, {"restart_s": 3 * HOUR}])
def test_goodput_equals_the_exact_expectation(changes):
    """Within four standard errors, also where failures hit saves and restarts."""
    model = model_of(**changes)
    mean, error = mean_and_error(simulate(model, 400, seed=1).goodput)
    edge = (model.interval_s + model.save_s + model.restart_s) / model.wall_s  # start and end of a run
    assert abs(mean - exact_goodput(model)) < 4 * error + edge
    assert 4 * error + edge < 0.01


def test_waste_equals_the_first_order_formula_where_its_assumptions_hold():
    """Saves and restarts are short against the time between failures: second-order terms are below 3%."""
    model = model_of(rates_per_s={"software": 1 / (100 * HOUR)}, wall_s=3000 * DAY)
    mean, error = mean_and_error(simulate(model, 200, seed=2).goodput)
    restore_s = model.detect_s + model.restart_s + model.load_s
    waste = lost_share(model.interval_s, model.save_s, model.between_s, restore_s)
    assert 1 - mean == pytest.approx(waste, rel=0.03)
    assert 4 * error < 0.03 * waste


@pytest.mark.parametrize(("save_s", "hours"), [(20.0, 10.0), (300.0, 24.0), (300.0, 6.0)])
def test_the_best_interval_of_the_sweep_is_dalys(save_s, hours):
    model = model_of(rates_per_s={"software": 1 / (hours * HOUR)}, save_s=save_s)
    daly_s = daly_interval_s(save_s, model.between_s)
    failures = next(draw_failures(model, 600, seed=3))
    points = try_intervals(model, failures, 0, base_s=1.3 * daly_s)  # not centred on the answer
    assert best_interval(points).interval_s == pytest.approx(daly_s, rel=0.15)


def test_without_failures_only_saves_are_lost():
    model = model_of(rates_per_s={"software": 0.0})
    outcomes = simulate(model, 3, seed=0)
    saves = math.floor(model.wall_s / (model.interval_s + model.save_s))
    rest = model.wall_s - saves * (model.interval_s + model.save_s)
    saved_s = saves * model.save_s + max(0.0, rest - model.interval_s)
    assert outcomes.goodput == pytest.approx([1 - saved_s / model.wall_s] * 3, rel=1e-12)
    assert outcomes.interruptions.tolist() == [0, 0, 0]
    assert all(outcomes.lost_s[reason].max() < 1e-6 for reason in LOSSES[1:])


def test_useful_and_lost_time_add_up_to_the_whole():
    """Every second of every run has one use, with waits and failures during restarts."""
    model = model_of(rates_per_s=dict.fromkeys(KINDS, 1 / (8 * HOUR)), wall_s=30 * DAY, spares=3)
    outcomes = simulate(model, 300, seed=4)
    whole = outcomes.goodput * model.wall_s + sum(outcomes.lost_s.values())
    assert whole == pytest.approx(np.full(300, model.wall_s), rel=1e-9)
    assert all(lost_s.min() > -1e-3 for lost_s in outcomes.lost_s.values())
    assert outcomes.lost_s["waiting for nodes"].mean() > 0


def walk(model: FailureModel, times, kinds, spares: int) -> tuple[float, float]:
    """Useful and waiting seconds of one run, event by event: an independent reference for the arrays."""
    in_repair, useful, waited = [], 0.0, 0.0
    ready = found = nodes = 0.0
    ends = [*zip(times, kinds, strict=True), (model.wall_s, "end")]
    for at, kind in ends:
        if kind == "software" and at < nodes:
            continue  # nothing runs that could fail
        trained = max(0.0, at - ready)
        cycles, rest = divmod(trained, model.interval_s + model.save_s)
        useful += cycles * model.interval_s + (min(rest, model.interval_s) if kind == "end" else 0.0)
        waited += max(0.0, min(at, nodes) - found)
        found = at + model.detect_s
        if kind != "software":
            in_repair.append(found + model.repair_s)
        back = sorted((t for t in in_repair if t > found), reverse=True)
        nodes = max(found, back[spares]) if len(back) > spares else found
        ready = nodes + model.restart_s + model.load_s
    return useful, waited


@pytest.mark.parametrize("spares", [0, 1, 4])
def test_arrays_equal_a_walk_over_the_events(spares):
    model = model_of(rates_per_s=dict.fromkeys(KINDS, 1 / (12 * HOUR)), wall_s=20 * DAY, repair_s=15 * HOUR)
    failures = next(draw_failures(model, 40, seed=5))
    outcomes = evaluate(find_downtime(failures, model, spares), model, model.interval_s)
    for run in range(40):
        mine = failures.run == run
        times, kinds = failures.at_s[mine][1:], [KINDS[k] for k in failures.kind[mine][1:]]
        useful, waited = walk(model, times, kinds, spares)
        assert outcomes.goodput[run] * model.wall_s == pytest.approx(useful, abs=1.0)
        assert outcomes.lost_s["waiting for nodes"][run] == pytest.approx(waited, abs=1.0)


def test_kinds_and_numbers_of_failures_follow_the_rates():
    rates = {"device": 8e-5, "node": 0.0, "switch": 1e-5, "software": 1e-5}
    model = model_of(rates_per_s=rates, wall_s=10 * DAY)
    failures = next(draw_failures(model, 2000, seed=6))
    counts = np.bincount(failures.kind + 1, minlength=5)[1:]
    expected = 2000 * model.wall_s * np.array([rates[kind] for kind in KINDS])
    assert counts[1] == 0
    assert np.all(np.abs(counts - expected) <= 5 * np.sqrt(expected))


def test_a_seed_repeats_and_alternatives_meet_the_same_failures():
    model = model_of()
    once, again, other = (simulate(model, 20, seed).goodput for seed in (7, 7, 8))
    assert np.array_equal(once, again)
    assert not np.array_equal(once, other)
    shorter = simulate(dataclasses.replace(model, interval_s=60.0, spares=5), 20, 7)
    assert shorter.interruptions.tolist() == simulate(model, 20, 7).interruptions.tolist()


def test_chunks_do_not_change_what_is_simulated(monkeypatch):
    """Mean goodput of many small chunks and of one: the same distribution, as many runs."""
    model = model_of(wall_s=30 * DAY)
    whole = simulate(model, 500, seed=9)
    monkeypatch.setattr("meshwright.simulate.failures.CHUNK_EVENTS", 1000)
    parts = simulate(model, 500, seed=9)
    assert len(parts.goodput) == 500
    errors = math.hypot(mean_and_error(whole.goodput)[1], mean_and_error(parts.goodput)[1])
    assert abs(whole.goodput.mean() - parts.goodput.mean()) < 5 * errors


def test_spares_end_the_waiting_and_too_many_are_not_worth_their_price():
    model = model_of(rates_per_s={"node": 1 / DAY}, wall_s=60 * DAY, repair_s=2 * DAY)
    points = try_spares(model, next(draw_failures(model, 500, seed=10)), model.interval_s)
    goodput = [point.goodput for point in points]
    best = best_spares(points)
    assert goodput == sorted(goodput)  # under the same failures a spare never harms
    assert goodput[0] < 0.4
    assert best.goodput > 0.9
    assert 2 < best.spares < points[-1].spares  # two nodes are in repair on average
