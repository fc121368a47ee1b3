"""The optimizer step with offloaded state: streamed through the device, or run by the CPU."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.layout.optimizer_state import predict_optimizer
from meshwright.layout.stages import local_parameters
from meshwright.plan.estimate.grid import OFFLOADS
from meshwright.plan.estimate.workload import OptimizerRate, Workload
from meshwright.plan.time.gemm import Device
from meshwright.plan.time.optimizer import STREAMED_SHARE, optimizer_s, streamed_weight_bytes
from meshwright.plan.time.rates import rates_of
from meshwright.plan.time.resnet import estimate_resnet_step
from meshwright.spec.load import load_job

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
    link = other.cluster.host_bytes_per_s
    adam_s, gradients_s = 30 * UPDATED / (0.2 * link), 4 * UPDATED / link
    assert seconds(other, "all") == pytest.approx(adam_s + gradients_s), "weights are copied in every pass"
    assert seconds(other, "optimizer") == pytest.approx(adam_s + gradients_s + 2 * UPDATED / link)
    assert seconds(ours, "all") == pytest.approx(30 * UPDATED / (0.5 * link) + gradients_s)


def test_a_streamed_weight_has_the_type_that_is_stored(make_workload):
    assert streamed_weight_bytes(make_workload(profile="torchtitan")) == 4, "FSDP2 casts on the device"
    assert streamed_weight_bytes(make_workload(profile="huggingface")) == 2, "DeepSpeed stores 16-bit weights"
    assert streamed_weight_bytes(make_workload(profile="huggingface", precision="fp32")) == 4


def test_a_resnet_streams_its_momentum_too():
    """Its step is not the engine's."""
    link = "cluster.host_bytes_per_s=1e9"
    plain, away = (
        load_job("resnet50", [link, *more, "layout.micro_batch=8"], on="1xh100-sxm", to_run=False)
        for more in ((), ("layout.offload=optimizer",))
    )
    momentum = predict_optimizer(local_parameters(plain, 0), plain.train).state_bytes
    (kept, _), (streamed, _) = (estimate_resnet_step(job, 1, 0, ()) for job in (plain, away))
    assert streamed["optimizer"] == pytest.approx(momentum / (STREAMED_SHARE * 1e9))
    assert streamed["optimizer"] > 10 * kept["optimizer"]


def test_on_a_cpu_offloading_copies_the_state_twice(make_workload, seconds):
    """Into the staging buffer and back, one after the other."""
    given = make_workload(profile="meshwright", optimizer=OptimizerRate(28.0, 0.0, 8.0))
    cluster = dataclasses.replace(given.cluster, device="cpu")
    on_cpu = dataclasses.replace(given, cluster=cluster)
    rate = Device.of(on_cpu, rates_of(on_cpu)).bytes_per_s
    assert seconds(on_cpu, "optimizer") - seconds(on_cpu) == pytest.approx(4 * 8 * UPDATED / rate)
