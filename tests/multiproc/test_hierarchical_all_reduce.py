"""The hierarchical all-reduce on real ranks: sums, order of buckets, bytes; training equals one process.

The ranks of both nodes are on this machine. ``benchmarks/hierarchical_all_reduce.py`` has two namespaces.
"""

from __future__ import annotations

import pytest
import torch
from prover import Prover, require_equal_and_planned

from meshwright.elastic.supervisor import Supervisor
from meshwright.layout.hierarchy import find_hierarchy
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.parallel.hierarchical_all_reduce import HierarchicalAllReduce
from meshwright.parallel.mesh import destroy_mesh, init_mesh
from meshwright.spec.load import load_job

RANKS = 4
JOB = [
    f"layout.dp_replicate={RANKS}",
    "train.all_reduce=hierarchical",
    "cluster.nodes=2",
    "cluster.devices_per_node=2",
    "cluster.nic_bytes_per_s=1e8",
    "cluster.nic_latency_s=1e-4",
]
BUCKETS = (1, 2, 7, 70_000, 131_073, 300_001)
"""Elements: fewer than ranks, odd, in one chunk and in several."""


def sum_buckets(run_dir, listener):
    """One rank: all buckets begin before the first one is waited for, several times."""
    counter = CollectiveCounter()
    counter.install()
    job = load_job(run_dir + "/job.toml", JOB)
    mesh = init_mesh(job, counter)
    hierarchy = find_hierarchy(job)
    all_reduce = HierarchicalAllReduce(mesh, hierarchy, BUCKETS)
    for turn in range(3):
        tensors = [torch.arange(count, dtype=torch.float32) * (mesh.rank + turn) for count in BUCKETS]
        futures = [all_reduce.start(tensor) for tensor in tensors]
        for tensor, future in zip(tensors, futures, strict=True):
            assert future.wait() is tensor
            factor = sum(rank + turn for rank in range(RANKS))
            assert torch.equal(tensor, torch.arange(tensor.numel(), dtype=torch.float32) * factor)
    all_reduce.close()
    rows = {f"{row['axis']} {row['op']}": (row["calls"], row["bytes"]) for row in counter.rows()}
    listener({"event": "summed", "rank": mesh.rank, "rows": rows})
    destroy_mesh(mesh)
    return 0


def test_buckets_of_any_size_are_summed_in_order(job_file, tmp_path):
    """Every rank sends whole padded buckets inside its node, and half of them between the nodes."""
    events = []
    Supervisor(f"{__name__}:sum_buckets", tmp_path, RANKS, 0, 10.0, events.append).run()
    ranks = [event for event in events if event["event"] == "summed"]
    assert len(ranks) == RANKS
    padded = sum(count + count % 2 for count in BUCKETS)
    calls = 3 * (1 + 1 + 1 + 1 + 2 + 4)
    for event in ranks:
        assert {name: tuple(row) for name, row in event["rows"].items()} == {
            "intra_node reduce_scatter": (calls, 3 * 4 * padded),
            "inter_node all_reduce": (calls, 3 * 2 * padded),
            "intra_node all_gather": (calls, 3 * 4 * padded),
        }


@pytest.mark.parametrize(
    "layout", ["layout.bucket_mb=0.1", "layout.dp_replicate=2 layout.dp_shard=2 layout.zero=1"]
)
def test_training_equals_one_process_and_the_plan(job_file, tmp_path, prepared, layout):
    """All checks of `prove`; calls and bytes of collectives equal the plan. With replicas, and ZeRO-1."""
    job = load_job(str(job_file), [*JOB, *layout.split()])
    proof = require_equal_and_planned(Prover(tmp_path / "proof", prepared), job)
    axes = {row.axis for row in proof.plan.collectives if row.phase == "step"}
    assert {"intra_node", "inter_node"} <= axes
