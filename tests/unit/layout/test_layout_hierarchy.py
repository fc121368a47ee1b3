"""The hierarchical all-reduce of gradients: its groups, its chunks, and where it has no effect."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.layout.hierarchy import bucket_sizes, explain_flat, find_hierarchy
from meshwright.layout.placement import tier_of
from meshwright.layout.process_groups import list_process_groups
from meshwright.plan.predict import complete_layout, predict
from meshwright.spec.legality.table import with_layout
from meshwright.spec.load import build_job

MODEL = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_size": 128,
    "vocab_size": 256,
}


def make_job(nodes, per_node, device="cpu", **layout):
    cluster = {"device": device, "devices_per_node": per_node, "matmul_flops_per_s": 1e11}
    if device == "cuda":
        cluster = {"preset": "h100-sxm", "devices_per_node": per_node}
    if nodes > 1:
        cluster |= {"nodes": nodes, "nic_bytes_per_s": 1e8, "nic_latency_s": 1e-5}
    tree = {
        "model": MODEL,
        "data": {"path": "corpus", "seq_len": 32},
        "train": {"steps": 2, "global_batch": 12, "all_reduce": "hierarchical"},
        "cluster": cluster,
        "layout": {"micro_batch": 1, **layout},
    }
    job = build_job(tree, to_run=False)
    return with_layout(job, complete_layout(job, job.layout))


def test_groups_of_replicas_with_tensor_parallelism():
    """Two nodes of four devices: ranks of tp are neighbours, so a node has two replicas of each tp rank."""
    job = make_job(2, 4, dp_replicate=4, tp=2)
    hierarchy = find_hierarchy(job)
    assert hierarchy.intra_node == ((0, 2), (4, 6), (1, 3), (5, 7))
    assert hierarchy.inter_node == ((0, 4), (2, 6), (1, 5), (3, 7))
    groups = dict(list_process_groups(job))
    assert groups["intra_node"] == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert [tier_of(job, axis) for axis in ("intra_node", "inter_node")] == ["node", "rack"]


@pytest.mark.parametrize(
    ("nodes", "per_node", "device", "layout", "reason"),
    [
        (1, 4, "cpu", {"dp_replicate": 4}, "on one node"),
        (2, 4, "cpu", {"dp_replicate": 2, "tp": 4}, "every node has one"),
        (2, 3, "cpu", {"dp_replicate": 4}, "different numbers"),
        (2, 2, "cuda", {"dp_replicate": 4}, "NCCL"),
    ],
)
def test_where_it_has_no_effect(nodes, per_node, device, layout, reason):
    """The backend then runs one all-reduce, and the plan says why."""
    job = make_job(nodes, per_node, device, **layout)
    assert find_hierarchy(job) is None
    assert reason in explain_flat(job)
    rows = predict(job, job.layout).traffic
    assert {row.axis for row in rows if row.phase == "step"} <= {"dp_replicate", "tp", "control"}


def test_pieces_and_buffers_of_buckets_that_do_not_split_evenly():
    """Three ranks per node: chunks cover the padded bucket once; buffers have room for the largest one."""
    job = make_job(2, 3, dp_replicate=6, bucket_mb=0.05)
    hierarchy, buckets = find_hierarchy(job), bucket_sizes(job)
    assert any(count % 3 for count in buckets)
    for count in (1, 2, 3, 70_000, 131_072, 1_000_001):
        chunks = hierarchy.chunks(count)
        assert chunks[0][0] == 0
        assert [high for _, high in chunks[:-1]] == [low for low, _ in chunks[1:]]
        assert 0 <= chunks[-1][1] * 3 - count < 3
    assert [len(hierarchy.chunks(count)) for count in (1, 131_072, 1_000_001)] == [1, 2, 4]
    padded, shard = hierarchy.buffer_sizes(buckets)
    assert padded == max(-(-count // 3) * 3 for count in buckets if count % 3)
    assert shard == max(-(-count // 3) for count in buckets)
    assert hierarchy.buffer_sizes([6, 12]) == (0, 4)


def test_predicted_bytes_memory_and_time():
    """A node sends a third less than with a ring over four ranks; the buffers are in the ledger."""
    job = make_job(2, 2, dp_replicate=4)
    phased, flat = predict(job, job.layout), predict(make_flat(job), job.layout)
    rows = {(row.axis, row.op): row for row in phased.traffic if row.phase == "step"}
    sizes = bucket_sizes(job)
    padded = sum(-(-count // 2) * 2 for count in sizes) * 4
    assert rows["intra_node", "reduce_scatter"].bytes == rows["intra_node", "all_gather"].bytes == padded
    assert rows["inter_node", "all_reduce"].bytes == padded // 2
    assert ("dp_replicate", "all_reduce") not in rows
    shard = find_hierarchy(job).buffer_sizes(sizes)
    peaks = [found.memory.ledgers[0].peak_bytes for found in (phased, flat)]
    assert peaks[0] - peaks[1] == 4 * sum(shard)
    assert phased.step_s < flat.step_s


def make_flat(job):
    """The same job with one collective of the backend."""
    return replace(job, train=replace(job.train, all_reduce="backend"))
