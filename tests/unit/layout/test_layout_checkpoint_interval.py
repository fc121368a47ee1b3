"""The interval between checkpoints: the values that Daly (2006) prints, Young's, and failure rates."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from meshwright.layout.checkpoint_interval import (
    FailureRate,
    SaveCost,
    choose_interval,
    daly_interval_s,
    failure_rate,
    lost_share,
    young_interval_s,
)
from meshwright.spec.cluster import Cluster

MINUTE, HOUR = 60.0, 3600.0
CLUSTER = Cluster(
    device="cuda", devices_per_node=8, memory_bytes=1, memory_bytes_per_s=1.0, fp32_flops_per_s=1.0,
    bf16_flops_per_s=1.0, link_bytes_per_s=1.0, link_latency_s=1.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("mtbf_s", "minutes", "digits"),
    [(24 * HOUR, 117, 0), (6 * HOUR, 57, 0), (15 * MINUTE, 9.1, 1)],
)
def test_the_values_that_daly_prints(mtbf_s, minutes, digits):
    """For a save of 5 minutes."""
    assert round(daly_interval_s(5 * MINUTE, mtbf_s) / MINUTE, digits) == minutes


def test_a_worked_example():
    """A failure every 3.09 h, 10 s per save, 10 min per restart: 7.86 min by Young, 9.6% of the time lost."""
    mtbf_s = 3.09 * HOUR
    young_s = young_interval_s(10, mtbf_s)
    assert young_s / MINUTE == pytest.approx(7.86, abs=0.005)
    assert daly_interval_s(10, mtbf_s) / MINUTE == pytest.approx(7.75, abs=0.005)
    assert lost_share(young_s, 10, mtbf_s, 10 * MINUTE) == pytest.approx(0.096, abs=5e-4)


@pytest.mark.parametrize("cost_s", [2.0, 2.001, 100.0])
def test_a_save_longer_than_two_failures_apart_gives_the_mean_time_between_failures(cost_s):
    assert daly_interval_s(cost_s, 1.0) == 1.0


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(1.0, 1e5), (10.0, 11124.0), (300.0, 21600.0)])
def test_daly_loses_less_than_other_intervals(cost_s, mtbf_s):
    """By Daly's own model: the wall time per second of work grows with exp((interval + cost) / M) - 1."""

    def wall(interval_s: float) -> float:
        return mtbf_s * math.expm1((interval_s + cost_s) / mtbf_s) / interval_s

    best = daly_interval_s(cost_s, mtbf_s)
    assert wall(best) < min(wall(best * 0.8), wall(best * 1.25))


def test_the_failure_rate_of_a_cluster_is_the_sum_over_its_devices():
    """Llama 3: 16,384 GPUs with 419 interruptions in 54 days are 50,700 h per device and 3.09 h for all."""
    known = failure_rate(replace(CLUSTER, failure_hours=54 * 24 * 16384 / 419), 16384)
    assert known.mtbf_s / HOUR == pytest.approx(3.09, abs=0.005)
    assert known.devices == "16384 devices"
    assumed = failure_rate(CLUSTER, 16384)
    assert assumed.mtbf_s == pytest.approx(6000 * HOUR / 2048), "4 failures per 1,000 node-days"
    assert (assumed.devices, failure_rate(CLUSTER, 9).devices) == ("2048 nodes", "2 nodes")
    assert "cluster.failure_hours" in assumed.basis


def test_the_choice_is_a_sentence_with_its_figures():
    choice = choose_interval(SaveCost(2.0, 8.0, 30.0), FailureRate(3.09 * HOUR, "16384 devices", "measured"))
    assert choice.sentence() == (
        "a checkpoint every 7 min 45 s: a save costs 10.00 s (2.00 s blocked, 8.00 s by slower steps), and "
        "the mean time between failures of 16384 devices is 3 h 5 min (measured)"
    )


def test_the_interval_is_never_shorter_than_a_save_takes_to_commit():
    choice = choose_interval(SaveCost(0.01, 0.0, 90.0), FailureRate(HOUR, "1 node", "measured"))
    assert choice.interval_s == 90.0
    assert choice.sentence().startswith(
        "a checkpoint every 1 min 30 s: a save takes 1 min 30 s until its commit"
    )
