"""The length of a training with failures: simulated, equal to the closed form, fast, with its spread."""

from __future__ import annotations

import dataclasses
import math

import pytest

from meshwright import load_job
from meshwright.layout.checkpoint_interval import expected_goodput
from meshwright.simulate.job_model import build_model
from meshwright.simulate.run_length import FAILURES, FEWEST_RUNS, simulate_run_length
from meshwright.simulate.settings import FailureSettings

DAY = 86_400.0


def spec_of(nodes: int, **cluster):
    job = load_job("llama3-8b", on=f"{nodes}x8xh100-sxm").spec
    return dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, **cluster))


@pytest.mark.parametrize(("nodes", "hours"), [(1, 50_000.0), (64, 5_000.0), (1024, 5_000.0)])
def test_the_mean_is_the_exact_expectation(nodes, hours):
    """Failed nodes are replaced at once: the assumptions of Daly's complete model hold."""
    job = spec_of(nodes, failure_hours=hours)
    found = simulate_run_length(job, 60 * DAY)
    model, _ = build_model(job, 60, FailureSettings())
    restore_s = model.detect_s + model.restart_s + model.load_s
    exact = expected_goodput(model.interval_s, model.save_s, model.mtbf_s, restore_s)
    assert 60 * DAY / found.wall_s == pytest.approx(exact, abs=0.003)
    assert found.lost_share == pytest.approx(1 - 60 * DAY / found.wall_s)
    assert found.low_s < found.wall_s < found.high_s


def test_more_devices_fail_more_often():
    lost = [simulate_run_length(spec_of(nodes), 30 * DAY).lost_share for nodes in (1, 16, 256, 4096)]
    assert lost == sorted(lost)
    assert all(0 < share < 1 for share in lost)


def test_a_run_that_makes_no_progress_never_ends():
    found = simulate_run_length(spec_of(1024, failure_hours=100.0), 30 * DAY)
    assert (found.wall_s, found.lost_share) == (math.inf, 1.0)


def test_the_number_of_failures_is_bounded():
    """The planner tries dozens of sizes: each simulates about as many failures."""
    for nodes in (1, 64, 4096):
        model, _ = build_model(spec_of(nodes), 60, FailureSettings())
        assert model.expected * FEWEST_RUNS < 5 * FAILURES


@pytest.mark.parametrize("ratio", [1e-6, 0.1, 1.0, 1e4])
def test_the_expectation_is_a_share(ratio):
    assert 0 <= expected_goodput(100.0, 1.0, 100.0 / ratio, 600.0) <= 1
