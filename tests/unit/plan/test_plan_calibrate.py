"""Fitted rates: they explain steps that were measured, and change nothing without a reason."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.plan.calibrate import Timed, calibrate, fitted_keys, mean_error
from meshwright.plan.choose import evaluate
from meshwright.plan.runnable import rank_runnable
from meshwright.spec.load import build_job


def build(model=None, **cluster):
    return build_job(
        {
            "model": {"preset": "demo-2m", **(model or {})},
            "cluster": {"preset": "local", "device": "cpu", "devices_per_node": 4, **cluster},
            "data": {"path": "text", "seq_len": 128},
            "train": {"steps": 4, "global_batch": 32},
        }
    )


def on_machine(job, layouts, **times):
    """What the layouts take on a machine whose rates are other ones than the job's cluster says."""
    rates = {key: getattr(job.cluster, key) * factor for key, factor in times.items()}
    real = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, **rates))
    return [Timed(layout, evaluate(real, layout).time.total_s) for layout in layouts]


@pytest.mark.parametrize(
    "times",
    [
        {"fp32_flops_per_s": 0.25},
        {"memory_bytes_per_s": 3.0},
        {"link_bytes_per_s": 0.1, "link_latency_s": 5.0},
        {"fp32_flops_per_s": 2.0, "memory_bytes_per_s": 0.3, "link_bytes_per_s": 0.5, "link_latency_s": 2.0},
    ],
    ids=str,
)
def test_predictions_come_closer_to_a_machine_with_other_rates(times):
    """Also for a layout that was not measured: the rates are the machine's, not the layouts'."""
    job = build()
    layouts = [candidate.layout for candidate in rank_runnable(job, {})]
    measured, unseen = on_machine(job, layouts[:6], **times), on_machine(job, layouts[6:30], **times)
    fitted = calibrate(job, measured)
    again = dataclasses.replace(job, cluster=fitted.cluster)
    assert fitted.error_after < 0.2 * fitted.error_before
    assert mean_error(again, measured) == pytest.approx(fitted.error_after)
    assert mean_error(again, unseen) < mean_error(job, unseen)


def test_a_right_cluster_stays_as_it_is():
    job = build()
    layouts = [candidate.layout for candidate in rank_runnable(job, {})[:4]]
    fitted = calibrate(job, on_machine(job, layouts))
    assert fitted.cluster == job.cluster
    assert fitted.error_before == fitted.error_after == pytest.approx(0.0)


def test_a_link_that_no_measured_layout_uses_keeps_its_figures():
    job = build()
    alone = [c.layout for c in rank_runnable(job, {}) if c.layout.world_size == 1]
    fitted = calibrate(job, on_machine(job, alone[:3], fp32_flops_per_s=0.5))
    changed = {key for key in fitted.before if fitted.before[key] != fitted.after[key]}
    assert "fp32_flops_per_s" in changed
    assert changed.isdisjoint({"link_bytes_per_s", "link_latency_s"})


def test_the_rate_of_the_products_is_the_one_of_the_precision():
    job = build()
    low = dataclasses.replace(job, train=dataclasses.replace(job.train, precision="bf16"))
    assert (fitted_keys(job)[0], fitted_keys(low)[0]) == ("fp32_flops_per_s", "bf16_flops_per_s")


# What can be tried


def test_every_candidate_runs_and_fits_and_the_best_comes_first():
    job = build()
    found = rank_runnable(job, {})
    assert [c.time.total_s for c in found] == sorted(c.time.total_s for c in found)
    assert {c.layout.world_size for c in found} == {1, 2, 4}
    assert {c.layout.zero for c in found} == {0, 1, 2, 3}
    assert all(c.fits for c in found)
    assert len({c.layout for c in found}) == len(found), "none is tried twice"


def test_settings_that_are_named_are_kept():
    found = rank_runnable(build(), {"recompute": "full", "zero": 2})
    assert {(c.layout.recompute, c.layout.zero) for c in found} == {("full", 2)}
    sizes = {c.layout.micro_batch for c in rank_runnable(build(), {})}
    assert len(sizes) > 1, "the micro-batch is tried in two sizes where it is left open"


def test_what_does_not_fit_is_no_candidate():
    """Memory for the sharded state alone."""
    whole = rank_runnable(build(), {})
    least = min(c.ledger.first_peak_bytes for c in whole)
    found = rank_runnable(build(memory_bytes=int(least / 0.9)), {})
    assert 0 < len(found) < len(whole)
    assert all(c.ledger.first_peak_bytes <= least / 0.9 for c in found)


def test_ranks_that_share_sequences_and_experts_are_tried():
    """With experts every axis occurs, Ulysses beside the ring, and cp with and without ZeRO."""
    experts = {"num_experts": 4, "experts_per_token": 2, "num_layers": 1}
    found = [c.layout for c in rank_runnable(build(experts), {"recompute": "none"})]
    assert {layout.ep for layout in found} == {1, 2, 4}
    assert {layout.context for layout in found if layout.cp > 1} == {"ring", "ulysses"}
    assert {layout.zero for layout in found if layout.cp == 4} == {0, 1, 2, 3}
    assert {layout.ep for layout in found if layout.dp_replicate == 4} == {1}
    pinned = rank_runnable(build(experts), {"recompute": "none", "ep": 2, "context": "ring"})
    assert {(c.layout.ep, c.layout.context) for c in pinned} == {(2, "ring")}
