"""Simulated months of a job: assumptions, published runs, refused settings."""

from __future__ import annotations

import pytest

from meshwright import FailureSettings, load_job
from meshwright.core.errors import UserError
from meshwright.simulate.failures import KINDS
from meshwright.simulate.job_model import CAUSES


def llama3():
    return load_job("llama3-405b", on="2048x8xh100-sxm")


def test_causes_are_the_interruptions_of_llama3():
    assert sum(sum(causes.values()) for causes in CAUSES.values()) == 419
    assert {*CAUSES, "preemption"} == set(KINDS)


def test_llama3_419_interruptions_and_more_than_90_percent():
    """16,384 GPUs, 54 days.

    The rate of the preset is from this run: the count checks the arithmetic only. Goodput needs assumptions:
    10 min from a failure to the next step, 2.4 s per save (1 GB/s per node), as many spares as are worth it.
    """
    found = llama3().simulate_failures(54, runs=200, seed=1)
    assert found.interruptions.low < 419 < found.interruptions.high
    assert found.interruptions.mean == pytest.approx(54 * 24 * 16_384 / 5e4, rel=0.01)
    assert found.goodput.low > 0.90
    assert found.goodput.mean == pytest.approx(found.first_order_goodput, abs=0.01)


def test_goodput_of_llama3_depends_on_the_cost_of_a_save():
    """More than 90% with saves of 10 s, less with saves of 30 s."""
    costs = [FailureSettings(save_s=save_s) for save_s in (10.0, 30.0)]
    found = [llama3().simulate_failures(54, runs=60, settings=one).goodput.mean for one in costs]
    assert found[0] > 0.90 > found[1]


def test_opt_175b_downtime_is_inferred():
    """992 GPUs, 15.6 failures per 1,000 node-days, 59% up: 5.1 h lost per failure."""
    job = load_job("gpt3-175b", f"cluster.failure_hours={8 * 24_000 / 15.6}", on="124x8xa100-80g-sxm")
    found = job.simulate_failures(30, runs=10)
    assert found.lost_per_failure_s(0.59) / 3600 == pytest.approx(0.41 * 24 / (124 * 0.0156), rel=1e-6)
    with pytest.raises(UserError, match="simulate-goodput"):
        found.lost_per_failure_s(1.2)


def test_given_rates_replace_those_of_the_cluster():
    rates = {"device": 1000.0, "software": 0.0}
    found = load_job("tiny", on="4x8xh100-sxm").simulate_failures(
        10, runs=10, settings=FailureSettings(rates=rates)
    )
    assert found.model.rates_per_s["device"] == pytest.approx(4 / 86_400)
    assert found.model.rates_per_s["software"] == 0
    assert found.model.rates_per_s["node"] == pytest.approx(55 / 419 * 32 / (5e4 * 3600))


def test_nothing_fails_with_rates_of_zero():
    settings = FailureSettings(rates=dict.fromkeys(KINDS, 0.0), save_s=10.0, every_minutes=10.0)
    found = load_job("tiny", on="1x8xh100-sxm").simulate_failures(7, runs=5, settings=settings)
    share = found.lost_hours["checkpoints"].mean / (7 * 24)
    assert found.goodput.mean == pytest.approx(1 - share, rel=1e-12)
    assert share == pytest.approx(10 / 610, rel=0.01)
    assert (found.model.spares, found.interruptions.high) == (0, 0)
    assert max(found.intervals, key=lambda point: point.goodput) == found.intervals[-1]  # the longest
    with pytest.raises(UserError, match="simulate-goodput"):
        found.lost_per_failure_s(0.5)


def test_the_cost_pays_the_spares():
    settings = FailureSettings(spares=2)
    found = load_job("tiny", on="4x8xh100-sxm").simulate_failures(10, runs=5, settings=settings)
    assert found.cost == pytest.approx(3.0 * 6 * 8 * 240)
    assert load_job("tiny").simulate_failures(10, runs=5).cost is None


def test_an_interval_longer_than_the_time_between_failures_is_a_warning():
    settings = FailureSettings(every_minutes=600.0)
    found = llama3().simulate_failures(5, runs=5, settings=settings)
    assert "longer than the mean time between failures" in found.warnings[0]
    assert found.warnings[0].endswith("[simulate-long-interval]")
    assert llama3().simulate_failures(5, runs=5).warnings == ()


@pytest.mark.parametrize(
    ("days", "settings", "code"),
    [
        (0, {}, "simulate-days"),
        (-3, {}, "simulate-days"),
        (float("nan"), {}, "simulate-days"),
        (1e6, {}, "simulate-days"),
        (5, {"rates": {"device": -1.0}}, "simulate-rate"),
        (5, {"rates": {"device": float("nan")}}, "simulate-rate"),
        (5, {"rates": {"cable": 1.0}}, "simulate-rate"),
        (5, {"rates": {"device": 1e12}}, "simulate-rate"),
        (5, {"every_minutes": 0.0}, "simulate-setting"),
        (5, {"spares": -1}, "simulate-setting"),
        (5, {"save_s": 0.0}, "simulate-setting"),
        (5, {"restart_s": float("inf")}, "simulate-setting"),
        (5, {"repair_hours": -1.0}, "simulate-setting"),
        (5, {"repair": "soon"}, "simulate-setting"),
        (5, {"nodes_per_switch": 0}, "simulate-setting"),
        (5, {"nodes_per_switch": 5}, "simulate-setting"),
        (5, {"snapshot_minutes": 0.0}, "simulate-setting"),
        (5, {"snapshot_cost_s": 1.0}, "simulate-setting"),
        (5, {"min_nodes": 1}, "simulate-setting"),
        (5, {"min_nodes": 9, "replan": True}, "simulate-setting"),
        (5, {"nodes_per_replica": 1}, "simulate-setting"),
        (5, {"price_factor": 0.4}, "simulate-setting"),
        (5, {"price_factor": -1.0, "rates": {"preemption": 1.0}}, "simulate-setting"),
        (5, {"notice_s": -1.0}, "simulate-setting"),
        (5, {"replace_hours": float("nan")}, "simulate-setting"),
    ],
)
def test_bad_settings_are_refused(days, settings, code):
    with pytest.raises(UserError) as caught:
        load_job("tiny", on="4x8xh100-sxm").simulate_failures(
            days, runs=5, settings=FailureSettings(**settings)
        )
    assert [problem.code for problem in caught.value.problems] == [code]


def test_all_mistakes_are_reported_at_once():
    settings = FailureSettings(rates={"node": -1.0}, spares=-2)
    with pytest.raises(UserError) as caught:
        load_job("tiny").simulate_failures(0, runs=0, settings=settings)
    codes = [problem.code for problem in caught.value.problems]
    assert codes == ["simulate-days", "simulate-setting", "simulate-setting", "simulate-rate"]


def goodput(job, days=54, runs=200, **settings) -> float:
    return job.simulate_failures(days, runs=runs, settings=FailureSettings(**settings)).goodput.mean


def test_snapshots_save_the_work_that_device_failures_would_lose():
    """Slow saves make checkpoints rare: a failure loses long work, unless a snapshot has it."""
    without, with_snapshots = (
        llama3().simulate_failures(
            54, runs=60, settings=FailureSettings(save_s=60.0, spares=20, snapshot_minutes=minutes)
        )
        for minutes in (None, 1.0)
    )
    saved = without.lost_hours["lost work"].mean - with_snapshots.lost_hours["lost work"].mean
    assert saved > 0.3 * without.lost_hours["lost work"].mean
    assert with_snapshots.model.interval_s > 1.5 * without.model.interval_s  # fewer failures need them
    assert with_snapshots.goodput.mean > without.goodput.mean + 0.02
    assert with_snapshots.first_order_goodput is None


def test_going_on_with_fewer_nodes_beats_waiting_without_spares():
    given = ("layout.tp=8", "layout.dp_shard=16", "layout.micro_batch=1", "train.global_batch=1024")
    job = load_job("llama3-8b", *given, on="16x8xh100-sxm")
    rates = {"node": 20.0}
    waits = goodput(job, spares=0, rates=rates)
    goes_on = goodput(job, spares=0, rates=rates, replan=True, min_nodes=1)
    assert goes_on > waits + 0.1
    in_repair = 16 * (20 + 0.3) / 1000  # nodes that are missing on average; 24 h of repair each
    assert goes_on == pytest.approx(1 - in_repair / 16, abs=0.02)  # 15 ranks have 7.8% more samples each
    assert goodput(job, spares=0, rates=rates, replan=True, min_nodes=16) == pytest.approx(waits)


def test_the_throughput_of_fewer_nodes_is_that_of_their_layouts():
    """15 nodes have few layouts, so they are slower than in proportion."""
    job = load_job("llama3-8b", on="16x8xh100-sxm")
    settings = FailureSettings(spares=0, rates={"node": 5.0}, replan=True, min_nodes=15)
    found = job.simulate_failures(5, runs=5, settings=settings)
    (fewer, share), (nodes, complete) = found.model.throughput
    assert (fewer, nodes, complete) == (15, 16, 1.0)
    assert 0.5 < share < 15 / 16
    assert any("throughput by the planner: 8" in text for text in found.assumptions)


def test_a_given_layout_keeps_its_other_degrees_on_fewer_nodes():
    """Seven ranks of a global batch of 64 have ten samples at most, eight have eight."""
    given = ("layout.tp=8", "layout.dp_replicate=1", "layout.dp_shard=8", "layout.micro_batch=1")
    job = load_job("llama3-8b", *given, "train.global_batch=64", "elastic.may_change=data", on="8x8xh100-sxm")
    found = job.simulate_failures(5, runs=5, settings=FailureSettings(spares=0)).model
    throughput = dict(found.throughput)
    assert throughput[7] == pytest.approx(8 / 10, rel=0.05)


def test_replicas_of_several_nodes_leave_nodes_idle():
    layout = ("layout.tp=8", "layout.dp_shard=16", "layout.micro_batch=1")
    job = load_job("llama3-8b", *layout, on="16x8xh100-sxm")
    given = {"spares": 0, "rates": {"node": 20.0}, "replan": True, "min_nodes": 1}
    assert goodput(job, **given) > goodput(job, **given, nodes_per_replica=8) + 0.02


def test_a_switch_that_takes_several_nodes_needs_more_spares():
    found = [
        llama3().simulate_failures(54, runs=60, settings=FailureSettings(nodes_per_switch=nodes))
        for nodes in (1, 16)
    ]
    assert found[1].model.spares > found[0].model.spares + 10
    assert found[1].goodput.mean < found[0].goodput.mean


def test_preemptible_machines_are_compared_with_others():
    job = load_job("llama3-8b", on="16x8xh100-sxm")
    rates = {"preemption": 50.0}
    settings = FailureSettings(rates=rates, price_factor=0.4, spares=1)
    found = job.simulate_failures(30, runs=200, settings=settings)
    other = found.on_demand
    assert other is not None
    assert found.interruptions.mean - other.interruptions.mean == pytest.approx(16 * 50 / 1000 * 30, rel=0.1)
    assert found.goodput.mean < other.goodput.mean
    assert found.cost == pytest.approx(0.4 * other.cost)
    assert found.cost_per_useful_hour < other.cost_per_useful_hour
    # Taken every ten minutes, they are not worth their price.
    often = FailureSettings(rates={"preemption": 10_000.0}, price_factor=0.4, spares=4)
    found = job.simulate_failures(10, runs=10, settings=often)
    assert found.cost_per_useful_hour > found.on_demand.cost_per_useful_hour


def test_a_notice_saves_the_work():
    job = load_job("llama3-8b", on="16x8xh100-sxm")
    given = {"rates": {"preemption": 100.0}, "spares": 2, "save_s": 20.0, "every_minutes": 120.0}
    found = [
        job.simulate_failures(30, runs=200, settings=FailureSettings(**given, notice_s=notice_s))
        for notice_s in (30.0, 10.0)
    ]
    hours = [one.lost_hours["lost work"].mean for one in found]
    assert hours[0] < 0.1 * hours[1]


def test_fewer_nodes_than_any_layout_needs():
    """An error with the number needed; a warning where the run only waits."""
    job = load_job("llama3-70b", on="8x8xh100-sxm")
    with pytest.raises(UserError, match=r"min_nodes=1 is too few.*Use \d+ or more. \[simulate-min-nodes\]"):
        goodput(job, replan=True, min_nodes=1)
    small = load_job("llama3-405b", on="4x8xh100-sxm")
    with pytest.raises(UserError, match=r"cluster.nodes=4 .* 8 nodes.*\[simulate-min-nodes\]"):
        goodput(small, replan=True)
    found = small.simulate_failures(5, runs=5)
    assert any(text.endswith("[simulate-too-few-nodes]") for text in found.warnings)


def test_snapshots_that_are_rarer_than_checkpoints_are_a_warning():
    settings = FailureSettings(every_minutes=5.0, snapshot_minutes=10.0)
    found = llama3().simulate_failures(5, runs=5, settings=settings)
    assert any(text.endswith("[simulate-rare-snapshots]") for text in found.warnings)


def test_the_job_says_whether_it_goes_on_with_fewer_nodes():
    def model_of(*overrides, **settings):
        job = load_job("llama3-8b", "layout.tp=8", "layout.pp=4", *overrides, on="16x8xh100-sxm")
        return job.simulate_failures(5, runs=5, settings=FailureSettings(**settings)).model

    assert not model_of().replans
    data = model_of("elastic.may_change=data")
    assert (data.replans, data.nodes_per_replica, data.min_nodes) == (True, 4, 4)
    whole = model_of("elastic.may_change=any")
    assert (whole.replans, whole.nodes_per_replica, whole.min_nodes) == (True, 1, 1)
    assert not model_of("elastic.may_change=any", replan=False).replans
    assert model_of(replan=True).min_nodes == 4
