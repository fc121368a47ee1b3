"""Cluster files: keys over a preset, all problems in one error, missing links, recognized GPUs."""

from __future__ import annotations

import pytest

from meshwright.core.errors import UserError
from meshwright.spec.load import build_job
from meshwright.spec.presets import read_preset

FILE = """
device = "cuda"
devices_per_node = 4
memory_bytes = 24000000000
memory_bytes_per_s = 1e12
fp32_flops_per_s = 5e13
bf16_flops_per_s = 1e14
link_bytes_per_s = 1e10
link_latency_s = 1e-5
"""


@pytest.fixture
def cluster_from_file(tree, tmp_path):
    """``cluster_from_file(text, nodes=2)``: the cluster of a file, changed by keys of the job."""

    def build(text: str, **keys):
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        return build_job({**tree(), "cluster": {"file": str(path), **keys}}, to_run=False).cluster

    return build


@pytest.fixture
def problems(cluster_from_file):
    """The problems of such a cluster, by path."""

    def find(text: str, **keys):
        with pytest.raises(UserError) as caught:
            cluster_from_file(text, **keys)
        return {p.path: p for p in caught.value.problems}

    return find


def test_cluster_file_reports_all_problems_at_once(problems):
    text = FILE.replace("devices_per_node = 4", "devices_per_node = 0").replace("= 1e12", "= -1.0")
    text = text.replace("link_latency_s = 1e-5\n", "") + 'nodes = 2\nnvlink = 4\nfailure_hours = "often"\n'
    text += "spine_oversubscription = 0.5\n"
    found = problems(text)
    assert {path: p.code for path, p in found.items()} == {
        "cluster.devices_per_node": "job-out-of-range",
        "cluster.memory_bytes_per_s": "job-out-of-range",
        "cluster.link_latency_s": "job-missing-key",
        "cluster.nvlink": "job-unknown-key",
        "cluster.failure_hours": "job-wrong-type",
        "cluster.spine_oversubscription": "job-out-of-range",
        "cluster.nic_bytes_per_s": "cluster-links-missing",
    }


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({}, "cluster.nic_bytes_per_s"),
        ({"nic_bytes_per_s": 1e9}, "cluster.nic_latency_s"),
        ({"nic_latency_s": 1e-4}, "cluster.nic_bytes_per_s"),
    ],
)
def test_several_nodes_without_nic_figures_are_refused(cluster_from_file, problems, keys, path):
    (problem,) = problems(FILE, nodes=2, **keys).values()
    assert (problem.code, problem.path) == ("cluster-links-missing", path)
    assert cluster_from_file(FILE, nodes=1, **keys).nodes == 1
    assert cluster_from_file(FILE, nodes=2, nic_bytes_per_s=1e9, nic_latency_s=1e-4).world_size == 8


def test_cluster_file_may_extend_a_preset(cluster_from_file, problems):
    """Keys of the file replace those of the preset. Keys of the job replace those of the file."""
    cluster = cluster_from_file(
        'preset = "h100-sxm"\nnodes = 16\nnodes_per_rack = 4\nspine_oversubscription = 3.0\n', nodes=32
    )
    assert (cluster.nodes, cluster.nodes_per_rack, cluster.spine_oversubscription) == (32, 4, 3.0)
    assert cluster.peak_fp8_flops_per_s == pytest.approx(1.979e15)
    assert [p.code for p in problems('preset = "h1000"\n').values()] == ["cluster-unknown-preset"]


def test_spine_keys_without_nodes_per_rack_are_refused(problems):
    found = problems(FILE + "spine_latency_s = 1e-4\nspine_oversubscription = 2.0\n")
    assert {p.code for p in found.values()} == {
        "cluster-spine-latency-unused",
        "cluster-spine-oversubscription-unused",
    }


@pytest.mark.parametrize(
    ("gpu", "gib", "preset"),
    [
        ("NVIDIA GeForce RTX 4090", 24, "rtx-4090"),
        ("NVIDIA RTX A6000", 48, "rtx-a6000"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80g-sxm"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40g-sxm"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "a100-40g-pcie"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-80g-pcie"),
        ("NVIDIA A100-SXM-64GB", 63.4, "a100-64g-leonardo"),
        ("Tesla V100-PCIE-16GB", 15.8, "v100-16g-pcie"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-sxm"),
        ("NVIDIA H100 NVL", 93.1, "h100-nvl"),
        ("NVIDIA H100 PCIe", 79.1, "h100-pcie"),
        ("NVIDIA GB200", 184, "gb200-nvl72"),
    ],
)
def test_a_local_gpu_has_the_figures_of_its_chip_form_and_memory(monkeypatch, tree, gpu, gib, preset):
    """A module gets those of the usual machine, not of one with Omni-Path."""
    from meshwright.spec import load

    monkeypatch.setattr(load, "find_gpus", lambda: [(gpu, int(gib * 1024**3))])
    cluster = build_job(tree(cluster={"preset": "local"})).cluster
    figures = read_preset("clusters", preset)
    for key in ("memory_bytes_per_s", "bf16_flops_per_s", "link_bytes_per_s", "nic_bytes_per_s"):
        assert getattr(cluster, key) == pytest.approx(figures[key])


def test_a_local_gpu_of_an_unknown_chip_has_no_figures_of_another(monkeypatch, tree):
    from meshwright.spec import load

    without = build_job(tree(cluster={"preset": "local"})).cluster
    monkeypatch.setattr(load, "find_gpus", lambda: [("Quadro P4000", 8 * 1024**3)])
    assert (
        build_job(tree(cluster={"preset": "local"})).cluster.memory_bytes_per_s == without.memory_bytes_per_s
    )
