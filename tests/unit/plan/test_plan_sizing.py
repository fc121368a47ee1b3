"""Sizing a cluster: the fewest devices that meet the deadline, including time lost to failures."""

from __future__ import annotations

import math

import pytest

import meshwright.plan.sizing as sizing_module
from meshwright.plan.search.find import with_cluster
from meshwright.plan.sizing import (
    ClusterSize,
    Goal,
    RunLength,
    explain_size,
    list_assumptions,
    size_cluster,
    unmet_goal_error,
)

TABLES = {"data": {"seq_len": 2048}, "train": {"global_batch": 64}}
DAY = 86_400.0


def tenth_lost(job, train_s) -> RunLength:
    """A tenth of the time is lost, 9 to 12% in most runs."""
    return RunLength(train_s / 0.9, train_s / 0.91, train_s / 0.88, 0.1)


def test_smallest_size_that_meets_the_deadline_is_chosen(make_decoder_job):
    job = with_cluster(make_decoder_job("llama3-8b", **TABLES), cost_per_hour=2.0)
    sizing = size_cluster(job, Goal(1e11, 20 * DAY), {}, tenth_lost)
    answer = sizing.answer
    assert answer is not None
    assert answer.wall_s <= 20 * DAY
    smaller = [size for size in sizing.tried if size.devices <= answer.devices // 2]
    assert smaller
    assert all(size.wall_s > 20 * DAY for size in smaller)
    steps = math.ceil(1e11 / (64 * 2048))
    assert answer.wall_s == pytest.approx(steps * answer.prediction.step_s / (1 - answer.lost_share))
    assert answer.cost == pytest.approx(2.0 * answer.devices * answer.wall_s / 3600)
    assert explain_size(sizing, "H100").startswith(f"{answer.devices} x H100")
    low, high = f"{0.9 / 0.91 * answer.wall_s / DAY:.1f} days", f"{0.9 / 0.88 * answer.wall_s / DAY:.1f} days"
    assert f"({low} to {high})" in explain_size(sizing, "H100")
    assert sizing.summary()["devices"] == answer.devices


def test_one_device_is_chosen_if_it_is_enough(make_decoder_job):
    sizing = size_cluster(make_decoder_job("tiny", data={"seq_len": 32}), Goal(1e6, 30 * DAY), {}, tenth_lost)
    assert sizing.answer is not None
    assert sizing.answer.devices == 1
    assert explain_size(sizing, "H100").startswith("one H100 is enough: ")


def test_impossible_deadline_has_no_size(make_decoder_job):
    job = make_decoder_job("tiny", data={"seq_len": 32}, train={"global_batch": 2})
    sizing = size_cluster(job, Goal(1e12, 3600), {}, tenth_lost)
    assert sizing.answer is None
    assert sizing.summary()["devices"] is None
    tried = ", ".join(str(size.devices) for size in sizing.tried)
    assert f"({tried} x H100)" in explain_size(sizing, "H100")
    assert len(sizing.tried) < 14, "the search stops when more devices do not help"


@pytest.fixture
def ideal_scaling(monkeypatch):
    """Replace the layout search: 10,000 device hours on any number of devices but ``worse`` ones."""

    def install(worse=lambda devices: 1.0):
        def best_on(job, devices, tokens, pins, length_of):
            hours = 10_000 * worse(devices)
            cost = job.cluster.cost_per_hour * hours
            wall_s = hours * 3600 / devices
            return ClusterSize(
                devices, max(1, devices // 8), None, RunLength(wall_s, wall_s, wall_s, 0.0), cost
            )

        monkeypatch.setattr("meshwright.plan.sizing._best_on", best_on)

    return install


@pytest.fixture
def priced_job(make_decoder_job):
    return with_cluster(make_decoder_job("llama3-8b"), cost_per_hour=1.0)


@pytest.mark.parametrize("hours", [10_000 / 88, 10_000 / 100, 10_000 / 300])
def test_deadline_is_met_with_the_fewest_devices_between_doublings(priced_job, ideal_scaling, hours):
    ideal_scaling()
    answer = size_cluster(priced_job, Goal(1e12, hours * 3600), {}, tenth_lost).answer
    assert answer is not None
    needed = 10_000 / hours
    step = 8 if needed <= 128 else 32
    assert answer.devices == step * math.ceil(needed / step - 1e-9)


def test_deadline_and_budget_are_met_between_doublings(priced_job, ideal_scaling):
    """The first doubling that keeps the deadline is above the budget. A size below it meets both."""
    ideal_scaling(lambda devices: 1 + devices / 1000)
    sizing = size_cluster(priced_job, Goal(1e12, 150 * 3600, 11_000), {}, tenth_lost)
    assert sizing.answer is not None
    assert sizing.answer.devices == 72
    assert sizing.answer.cost <= 11_000
    assert 128 in [size.devices for size in sizing.tried]


def test_budget_buys_the_fastest_size_between_doublings(priced_job, ideal_scaling):
    ideal_scaling(lambda devices: 1 + devices / 1000)
    sizing = size_cluster(priced_job, Goal(1e12, None, 11_000), {}, tenth_lost)
    assert sizing.answer is not None
    assert sizing.answer.devices == 96, "104 devices cost 11,040 USD"


def test_limits_that_cannot_be_met_together_name_what_each_alone_allows(priced_job, ideal_scaling):
    """The search goes beyond the budget, so that the size that keeps the deadline is known with its cost."""
    ideal_scaling(lambda devices: 1 + devices / 1000)
    sizing = size_cluster(priced_job, Goal(1e12, 100 * 3600, 11_000), {}, tenth_lost)
    assert sizing.answer is None
    said = str(unmet_goal_error(sizing, "H100"))
    assert "the fastest within the budget is 96 devices: 4.8 days, 10,960 USD" in said
    assert "the deadline needs 112 devices: 4.1 days, 11,120 USD" in said


def test_a_deadline_that_no_size_meets_names_the_fastest_of_all(priced_job, ideal_scaling):
    """More than 64 devices are not faster; 64 are above the budget."""
    ideal_scaling(lambda devices: max(1.0, devices / 64) * (1 + devices / 1000))
    sizing = size_cluster(priced_job, Goal(1e12, 3600, 10_100), {}, tenth_lost)
    said = str(unmet_goal_error(sizing, "H100"))
    assert "the fastest within the budget is 8 devices: " in said
    assert "the fastest of all is 64 devices: 6.9 days, 10,640 USD" in said


def test_sizes_without_a_layout_are_reported(priced_job, ideal_scaling, monkeypatch):
    ideal_scaling()
    found = sizing_module._best_on
    monkeypatch.setattr(
        sizing_module,
        "_best_on",
        lambda job, devices, *rest: found(job, devices, *rest) if devices > 2 else None,
    )
    sizing = size_cluster(priced_job, Goal(1e12, 10_000 * 3600 / 8), {}, tenth_lost)
    assert sizing.too_small == (1, 2)
    assert sizing.answer is not None
    assert sizing.answer.devices == 8


def test_assumptions_for_missing_figures_are_named(make_decoder_job):
    bare = with_cluster(
        make_decoder_job("dense"), failure_hours=None, storage_bytes_per_s=None, cost_per_hour=None
    )
    assumptions = " ".join(list_assumptions(bare))
    assert "failure_hours" in assumptions
    assert "price unknown" in assumptions
    known = with_cluster(bare, failure_hours=1.0, storage_bytes_per_s=1.0, cost_per_hour=1.0)
    assert "price unknown" not in " ".join(list_assumptions(known))
    assert "failure_hours" not in " ".join(list_assumptions(known))
