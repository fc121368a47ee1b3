"""Probed collectives in the time model: by transport, by bucket, and without overlap where cores are busy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshwright.layout.parameters import count_parameters
from meshwright.plan.build import plan_from
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.predict import predict
from meshwright.plan.time.network import build_group, find_collectives, span_of_stride
from meshwright.plan.time.rates import rates_of
from meshwright.spec.probed import AttentionTime, CollectiveTime, GemmTime, Probed

COLLECTIVES = (
    CollectiveTime("all_reduce", "gloo", 2, 1e-3, 1e9),
    CollectiveTime("all_reduce", "shared_memory", 2, 2e-4, 4e9),
    CollectiveTime("reduce_scatter", "shared_memory", 2, 3e-4, 5e9),
    CollectiveTime("all_gather", "shared_memory", 2, 1e-4, 6e9),
)
PROBED = Probed(
    device="cpu",
    gemms=(GemmTime("fp32", 64, 64, 64, 1e-5, 1e-5, 1e-5),),
    attention=(AttentionTime("fp32", 1, 4, 4, 64, 64, 1e-5, 2e-5),),
    copy_bytes_per_s=1e10,
    optimizer_bytes_per_s=1e10,
    launch_s=1e-6,
    collectives=COLLECTIVES,
)


@pytest.fixture
def make_job(make_decoder_job):
    """A job on a probed CPU cluster of two cores, or more."""

    def make(transport="auto", cores=2, probed=PROBED, layout=None):
        job = make_decoder_job(
            "dense",
            cluster={"preset": "local", "device": "cpu", "devices_per_node": cores},
            train={"precision": "fp32", "transport": transport},
            layout={"dp_replicate": 2} if layout is None else layout,
        )
        return dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, probed=probed))

    return make


def part(job, name):
    return plan_from(predict(job, job.layout)).breakdown_s.get(name, 0.0)


@pytest.mark.parametrize(
    ("transport", "alpha_s", "rate"), [("gloo", 1e-3, 1e9), ("auto", 2e-4, 4e9), ("shared_memory", 2e-4, 4e9)]
)
def test_gradient_reduction_is_that_of_the_probed_transport(make_job, transport, alpha_s, rate):
    """One bucket; nothing is hidden, because both cores have a rank."""
    job = make_job(transport)
    expected = alpha_s + 4 * count_parameters(job.model) / rate
    assert part(job, "gradient reduction") == pytest.approx(expected, rel=1e-3)  # less the final norm
    assert part(job, "step overhead") == pytest.approx(alpha_s + 1 / rate)  # the control all-reduce


def test_every_bucket_has_the_latency_of_a_call(make_job):
    whole, cut = (make_job(layout={"dp_replicate": 2, "bucket_mb": size}) for size in (1000.0, 2.0))
    buckets = -(-4 * count_parameters(whole.model) // 2**21)
    assert buckets > 3
    more_s = part(cut, "gradient reduction") - part(whole, "gradient reduction")
    assert more_s == pytest.approx((buckets - 1) * 2e-4)


def test_idle_cores_hide_communication(make_job):
    assert part(make_job(cores=4), "gradient reduction") < 0.7 * part(make_job(), "gradient reduction")


def test_without_probed_collectives_the_link_of_the_cluster_counts(make_job):
    job = make_job(probed=dataclasses.replace(PROBED, collectives=()))
    assert not find_collectives(Workload.of(job))
    group = build_workload_group(Workload.of(job), np.array([2]))
    moved = np.array([1e6])
    cluster = job.cluster
    latency_s = cluster.link_latency_s * 1.2  # and that of the second rank
    assert group.all_reduce_s(moved)[0] == pytest.approx(1e6 / cluster.link_bytes_per_s + latency_s)


def build_workload_group(workload, ranks):
    span = span_of_stride(workload.cluster, ranks, np.ones_like(ranks), ranks)
    return build_group(workload.cluster, rates_of(workload), ranks, span, find_collectives(workload))


def test_operations_and_numbers_of_ranks(make_job):
    """As a ring; the latency of gloo grows with its steps. A group across nodes uses the network."""
    workload = Workload.of(make_job(cores=4))
    moved = np.array([1e6, 1e6])
    group = build_workload_group(workload, np.array([2, 4]))
    assert group.all_reduce_s(moved) == pytest.approx([2e-4 + 1e6 / 4e9, 2e-4 + 1.5 * 1e6 / 4e9])
    assert group.reduce_scatter_s(moved)[0] == pytest.approx(3e-4 + 1e6 / 5e9)
    assert group.all_gather_s(moved)[0] == pytest.approx(1e-4 + 1e6 / 6e9)
    gloo = dataclasses.replace(workload, transport="gloo")
    over_gloo = build_workload_group(gloo, np.array([2, 4]))
    assert over_gloo.all_reduce_s(moved) == pytest.approx([1e-3 + 1e6 / 1e9, 3e-3 + 1.5 * 1e6 / 1e9])
    nodes = dataclasses.replace(workload.cluster, nodes=2, devices_per_node=2)
    across = dataclasses.replace(workload, cluster=nodes)
    plain = dataclasses.replace(across, cluster=dataclasses.replace(nodes, probed=None))
    found, expected = (build_workload_group(w, np.array([4])) for w in (across, plain))
    assert found.all_reduce_s(moved[:1]) == pytest.approx(expected.all_reduce_s(moved[:1]))
