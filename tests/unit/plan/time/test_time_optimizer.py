"""The optimizer step with offloaded state: streamed through the device, or run by the CPU."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.plan.estimate.grid import OFFLOADS
from meshwright.plan.estimate.workload import OptimizerRate, Workload
from meshwright.plan.time.gemm import Device
from meshwright.plan.time.optimizer import STREAMED_SHARE, optimizer_s, streamed_weight_bytes
from meshwright.plan.time.rates import rates_of

UPDATED = 1e9
"""Parameters that a rank updates."""


@pytest.fixture
def seconds(make_grid):
    """``seconds(workload, "optimizer")``: the optimizer step with this kind of offloading."""

    def of(given: Workload, offload: str = "none") -> float:
        grid = make_grid(offload=[OFFLOADS.index(offload)])
        return float(optimizer_s(given, Device.of(given, rates_of(given)), grid, UPDATED)[0])

    return of


@pytest.fixture
def ours(make_workload) -> Workload:
    """Meshwright with AdamW: 30 bytes moved and 8 bytes of state per parameter."""
    return make_workload(profile="meshwright", optimizer=OptimizerRate(30.0, 0.0, 8.0))


def test_streamed_state_takes_one_direction_of_the_cpu_link(ours, seconds):
    """It is copied in and out at the same time; the update itself is hidden."""
    link = ours.cluster.host_bytes_per_s
    assert seconds(ours, "optimizer") == pytest.approx(8 * UPDATED / (STREAMED_SHARE * link))
    assert seconds(ours, "optimizer") > 5 * seconds(ours)


def test_an_update_without_state_is_not_slowed_by_streaming(ours, seconds):
    bare = dataclasses.replace(ours, optimizer=OptimizerRate(12.0, 0.0, 0.0))
    assert seconds(bare, "optimizer") == seconds(bare)


def test_a_fast_cpu_link_leaves_the_update(ours, seconds):
    cluster = dataclasses.replace(ours.cluster, host_bytes_per_s=1e15)
    fast = dataclasses.replace(ours, cluster=cluster)
    assert seconds(fast, "optimizer") == seconds(fast)


def test_other_frameworks_update_on_the_cpu(make_workload, ours, seconds):
    """DeepSpeed's optimizer offload runs Adam on the CPU, as everything offloaded does in ours."""
    other = make_workload(profile="huggingface")
    assert seconds(other, "optimizer") == seconds(other, "all") > 50 * seconds(other)
    assert seconds(ours, "all") > seconds(ours, "optimizer")


def test_a_streamed_weight_has_the_type_that_is_stored(make_workload):
    assert streamed_weight_bytes(make_workload(profile="torchtitan")) == 4, "FSDP2 casts on the device"
    assert streamed_weight_bytes(make_workload(profile="huggingface")) == 2, "DeepSpeed stores 16-bit weights"


def test_on_a_cpu_offloading_copies_the_state_twice(make_workload, seconds):
    """Into the staging buffer and back, one after the other."""
    given = make_workload(profile="meshwright", optimizer=OptimizerRate(28.0, 0.0, 8.0))
    cluster = dataclasses.replace(given.cluster, device="cpu")
    on_cpu = dataclasses.replace(given, cluster=cluster)
    rate = Device.of(on_cpu, rates_of(on_cpu)).bytes_per_s
    assert seconds(on_cpu, "optimizer") - seconds(on_cpu) == pytest.approx(4 * 8 * UPDATED / rate)
