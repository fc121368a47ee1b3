"""Calibration: fitted rates explain measured steps and change only where they must."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from meshwright.plan.calibrate import MeasuredLayout, calibrate, fitted_keys, mean_error
from meshwright.plan.predict import predict
from meshwright.plan.search.planner import search_job
from meshwright.spec.load import build_job


def build(**cluster):
    """A job on four CPU ranks, with changed cluster keys."""
    return build_job(
        {
            "model": {"preset": "demo-2m"},
            "cluster": {"preset": "local", "device": "cpu", "devices_per_node": 4, **cluster},
            "data": {"path": "text", "seq_len": 128},
            "train": {"steps": 4, "global_batch": 32},
        }
    )


@functools.cache
def list_layouts(job):
    """The layouts that ``tune`` would measure, the best first."""
    return [found.layout for found in search_job(job).best]


def on_machine(job, layouts, **times):
    """The step times of the layouts on a machine with other rates."""
    rates = {key: getattr(job.cluster, key) * factor for key, factor in times.items()}
    real = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, **rates))
    return [MeasuredLayout(layout, predict(real, layout).time.total_s) for layout in layouts]


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
def test_calibration_reduces_the_error_on_other_machines(times):
    """It does so also for layouts that were not measured."""
    job = build()
    layouts = list_layouts(job)
    measured, unseen = on_machine(job, layouts[:6], **times), on_machine(job, layouts[6:30], **times)
    fitted = calibrate(job, measured)
    again = dataclasses.replace(job, cluster=fitted.cluster)
    assert fitted.error_after < 0.2 * fitted.error_before
    assert mean_error(again, measured) == pytest.approx(fitted.error_after)
    assert mean_error(again, unseen) < mean_error(job, unseen)


def test_calibration_keeps_correct_rates():
    job = build()
    layouts = list_layouts(job)[:4]
    fitted = calibrate(job, on_machine(job, layouts))
    assert fitted.cluster == job.cluster
    assert fitted.error_before == fitted.error_after == pytest.approx(0.0)


def test_calibration_keeps_the_rates_of_unused_links():
    job = build()
    alone = list_layouts(build(devices_per_node=1))[:3]
    fitted = calibrate(job, on_machine(job, alone, fp32_flops_per_s=0.5))
    changed = {key for key in fitted.before if fitted.before[key] != fitted.after[key]}
    assert "fp32_flops_per_s" in changed
    assert changed.isdisjoint({"link_bytes_per_s", "link_latency_s"})


def test_calibration_fits_the_gemm_rate_of_the_precision():
    job = build()
    low = dataclasses.replace(job, train=dataclasses.replace(job.train, precision="bf16"))
    assert (fitted_keys(job)[0], fitted_keys(low)[0]) == ("fp32_flops_per_s", "bf16_flops_per_s")
