"""Cluster files: keys over a preset, all problems in one error, missing links, recognized GPUs."""

from __future__ import annotations

import pytest

from meshwright.core.errors import UserError
from meshwright.spec.load import build_job

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


def test_gpu_is_recognized_by_its_model_number(monkeypatch, tree):
    """An RTX 4090 gets its own figures. An RTX A6000 does not."""
    from meshwright.spec import load

    for gpu, name in (("NVIDIA GeForce RTX 4090", "4090"), ("NVIDIA RTX A6000", "CPU core")):
        monkeypatch.setattr(load, "find_gpus", lambda gpu=gpu: [(gpu, 24 * 1024**3)])
        cluster = build_job(tree(cluster={"preset": "local"})).cluster
        assert (cluster.memory_bytes_per_s == pytest.approx(1.008e12)) is (name == "4090")
