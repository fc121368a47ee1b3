"""GEMM and collective times: lower bounds, shapes and links."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshwright.plan.estimate.workload import Workload
from meshwright.plan.profiles import PROFILES
from meshwright.plan.time.gemm import UNALIGNED, Device, gemm_s
from meshwright.plan.time.interval import generation_of
from meshwright.plan.time.network import build_group, span_of_stride
from meshwright.plan.time.rates import calibrated_device, load_calibration, merge_rates, rates_of
from meshwright.spec.model import DecoderModel
from meshwright.validation.devices import known_devices

MODEL = DecoderModel(
    num_layers=2, hidden_size=1024, num_heads=8, num_kv_heads=8, ffn_size=4096, vocab_size=1024
)


@pytest.fixture
def device() -> Device:
    cluster = known_devices()["A100-80GB-SXM"]
    work = Workload(MODEL, cluster, 2048, 8, "bf16", PROFILES["megatron-lm"])
    return Device.of(work, rates_of(work))


@pytest.mark.parametrize("rows", [128, 2048, 8192])
@pytest.mark.parametrize("columns", [256, 4096])
@pytest.mark.parametrize("depth", [64, 8192])
def test_gemm_takes_at_least_the_time_of_its_flops_and_bytes(device, rows, columns, depth):
    taken = float(gemm_s(device, rows, columns, depth))
    moved = 2 * (rows * depth + depth * columns + rows * columns)
    assert taken > 2 * rows * columns * depth / device.flops_per_s
    assert taken > moved / device.bytes_per_s


def test_partial_last_wave_costs_a_full_wave(device):
    """With one more column of tiles than fits on 108 multiprocessors the rate falls, then recovers."""
    columns = np.arange(1, 60) * 256
    rate = 2048 * columns * 8192 / gemm_s(device, 2048, columns, 8192)
    assert rate.max() == pytest.approx(rate[-10:].max(), rel=0.05)
    assert (np.diff(rate) < -0.02 * rate.max()).any(), "waves are visible"


def test_unaligned_rows_lower_the_gemm_rate(device):
    whole, odd = gemm_s(device, 8192, 8192, 8192), gemm_s(device, 8192, 8193, 8192)
    assert whole / odd == pytest.approx(UNALIGNED, rel=0.1)


def test_grouped_gemm_is_faster_than_separate_gemms(device):
    alone, together = 64 * gemm_s(device, 64, 512, 1024), gemm_s(device, 64, 512, 1024, 64)
    assert together < alone / 2


def group(ranks: int, stride: int, **changes: object):
    cluster = dataclasses.replace(known_devices()["H100-80GB-SXM"], nodes=16, **changes)
    rates = merge_rates(load_calibration(), "H100")
    members = np.array([ranks])
    span = span_of_stride(cluster, members, np.array([stride]), members * stride)
    return build_group(cluster, rates, members, span), cluster, rates


def test_ring_uses_node_links_or_the_nics_of_its_members():
    inside, cluster, rates = group(8, 1)
    assert inside.bytes_per_s[0] == cluster.link_bytes_per_s * rates.link
    sparse, _, _ = group(8, 8)
    dense, _, _ = group(32, 1)
    assert sparse.bytes_per_s[0] == pytest.approx(cluster.nic_bytes_per_s * rates.nic)
    assert dense.bytes_per_s[0] == pytest.approx(
        min(cluster.link_bytes_per_s * rates.link, 8 * cluster.nic_bytes_per_s * rates.nic)
    )


def test_collectives_have_the_bytes_of_a_ring_and_one_rank_has_none():
    ring, _, _ = group(8, 1)
    moved = np.array([1e9])
    idle = ring.latency_s + ring.hops_s
    wire = ring.all_gather_s(moved) - idle
    assert wire[0] == pytest.approx(1e9 * 7 / 8 / ring.bytes_per_s[0])
    assert ring.all_reduce_s(moved)[0] - idle[0] == pytest.approx(2 * wire[0])
    assert ring.all_reduce_s(np.array([0.0]))[0] == 0, "zero bytes need no call"
    alone, _, _ = group(1, 1)
    for call in (alone.all_gather_s, alone.all_reduce_s, alone.send_s):
        assert call(moved)[0] == 0
    assert alone.all_to_all_s(moved, 1.0)[0] == 0


@pytest.mark.parametrize(("ranks", "measured"), [(2, 40e-6), (4, 50e-6), (8, 87e-6)])
def test_latency_grows_with_the_ranks_of_a_node_as_measured(ranks, measured):
    """The reference is nccl-tests on A100 with NVLink 3.

    It is an all-reduce of 1 MiB minus the time of its bytes at full rate.
    """
    rates = merge_rates({**load_calibration(), "device.X": {"link_latency": 1.75}}, "X")
    cluster, members = known_devices()["A100-80GB-SXM"], np.array([ranks])
    span = span_of_stride(cluster, members, np.array([1]), members)
    ring = build_group(cluster, rates, members, span)
    assert ring.latency_s[0] + ring.hops_s[0] == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(("key", "ranks"), [("link_latency_s", 8), ("nic_latency_s", 32)])
def test_latencies_of_a_gpu_cluster_count(key, ranks):
    """Twice the latency of the cluster is twice the latency of its collectives, within and between nodes."""
    usual, cluster, _ = group(ranks, 1)
    slow, _, _ = group(ranks, 1, **{key: 2 * getattr(cluster, key)})
    slower, _, _ = group(ranks, 1, **{key: 3 * getattr(cluster, key)})
    assert slow.latency_s[0] > usual.latency_s[0]
    assert slower.latency_s[0] - slow.latency_s[0] == pytest.approx(slow.latency_s[0] - usual.latency_s[0])


def test_copies_to_one_node_cross_the_network_once():
    far, _, _ = group(32, 1)
    moved = np.array([8e9])
    once = [far.all_to_all_s(moved, 1.0, copies)[0] - far.latency_s[0] for copies in (1, 8)]
    sent = 3 * (1 - (3 / 4) ** 8) / 8
    assert once[1] / once[0] == pytest.approx(sent / (3 / 4))


def test_node_limited_routing_sends_to_fewer_nodes():
    far, _, _ = group(64, 1)
    moved = np.array([8e9])
    free, limited, loose = (
        far.all_to_all_s(moved, 1.0, 8, most)[0] - far.latency_s[0] for most in (np.inf, 4, 8)
    )
    assert limited / free == pytest.approx((4 / 8) / (1 - (7 / 8) ** 8))
    assert loose == free


def test_rates_of_a_device_override_the_defaults():
    tables = {section: dict(values) for section, values in load_calibration().items()}
    tables["device.H100"] = {"matmul": 0.1}
    assert merge_rates(tables, "H100").matmul == 0.1
    assert merge_rates(tables, "L40S").matmul == tables["default"]["matmul"], "a device without its own rates"


def test_no_rate_belongs_to_a_framework_or_a_source():
    assert all(section == "default" or section.startswith("device.") for section in load_calibration())


def test_all_gathers_over_more_ranks_take_longer_than_their_bytes():
    """A ring has as many steps as ranks: 1,024 ranks need more time for the same bytes than 16."""
    moved, times = np.array([1e8]), []
    for ranks in (16, 1024):
        cluster = dataclasses.replace(known_devices()["A100-80GB-SXM"], nodes=ranks // 8)
        rates = merge_rates(load_calibration(), "A100")
        members = np.array([ranks])
        ring = build_group(
            cluster, rates, members, span_of_stride(cluster, members, members * 0 + 1, members)
        )
        wire = moved * (ranks - 1) / ranks / ring.bytes_per_s
        times.append(float(ring.all_gather_s(moved)[0] - wire[0]))
    assert times[1] > 20 * times[0] > 0


def test_grouped_gemms_need_tokens_per_expert():
    """On an H200 grouped GEMMs with 128 tokens per expert reach two thirds of the rate with 2,048 or less."""
    cluster = known_devices()["H200-141GB-SXM"]
    work = Workload(MODEL, cluster, 2048, 8, "bf16", PROFILES["megatron-core"])
    hopper = Device.of(work, rates_of(work))
    rates = [tokens * 16 / float(gemm_s(hopper, tokens, 4096, 2048, 16)) for tokens in (32, 128, 2048)]
    assert rates[0] < 0.25 * rates[2]
    assert 0.4 * rates[2] < rates[1] < 0.75 * rates[2]


@pytest.mark.parametrize(
    ("name", "generation"),
    [("A100-40GB-SXM", "A100"), ("H800-80GB-SXM", "H100"), ("GB300-NVL72", "B300"), ("L40S-48GB", "L40S")],
)
def test_devices_of_one_generation_share_their_calibration(name, generation):
    assert calibrated_device(name) == generation


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H200", "H200-141GB-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB-SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB-SXM"),
        ("Tesla V100-SXM2-16GB", "V100-16GB-SXM"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("NVIDIA GeForce RTX 4090", "4090-24GB-PCIe"),
        ("NVIDIA L40S", "L40S-48GB"),
        ("AMD Instinct MI300X", "MI300X-192GB"),
        ("AMD Instinct MI250X", "MI250X-64GB"),
        ("NVIDIA A10G", "A10G-24GB-PCIe"),
        ("NVIDIA L4", "L4-24GB-PCIe"),
        ("NVIDIA RTX A6000", "A6000-48GB-PCIe"),
        ("NVIDIA GeForce RTX 5090", "5090-32GB-PCIe"),
    ],
)
def test_driver_names_have_the_rates_of_the_preset(name, preset):
    """The name of a GPU of this machine comes from its driver, that of a preset from its file."""
    assert preset in known_devices()
    assert calibrated_device(name) == calibrated_device(preset)
    assert generation_of(name) == generation_of(preset) != ""
