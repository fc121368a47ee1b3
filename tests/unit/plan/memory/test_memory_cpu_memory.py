"""CPU memory of a node in the plan: which node, what it holds, and whether snapshots fit."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.layout.shared_memory import collective_bytes
from meshwright.layout.snapshot_size import predict_snapshot_bytes, slot_bytes
from meshwright.layout.state_chunks import predict_staging_bytes, staging_bytes, written_chunks
from meshwright.plan.build import build_plan, summarize_plan
from meshwright.plan.contract import read_plan, write_plan
from meshwright.plan.memory.cpu_memory import follow_layout

ON_CPU = {"device": "cpu", "host_memory_bytes": None}
LAYOUT = {"dp_replicate": 2, "bucket_mb": 0.1}


def test_a_slot_counts_counters_and_aligned_tensors():
    """Two tensors of 4 and 65 bytes take 64 and 128 bytes; the slot ends at a page."""
    assert slot_bytes([4, 65]) == 8192
    assert slot_bytes([]) == 4096
    assert slot_bytes([4096]) == 8192
    assert slot_bytes([4097]) == 12288


def test_a_node_holds_the_snapshots_and_peaks_of_its_ranks(make_job):
    plan, _ = build_plan(make_job(layout=LAYOUT, cluster=ON_CPU))
    each = predict_snapshot_bytes(plan.job, 0)
    host = plan.host_memory
    assert [rank.snapshot_bytes for rank in plan.ranks] == [each, each]
    assert (host.ranks, host.snapshot_bytes, host.offloaded_bytes) == (2, 2 * each, 0)
    assert host.training_bytes == sum(rank.needed_bytes for rank in plan.ranks)
    assert host.room_bytes == plan.job.cluster.memory_bytes * plan.job.cluster.devices_per_node
    assert host.snapshots_off == ""


def test_ranks_of_several_nodes_are_counted_node_by_node(make_job):
    cluster = {"nodes": 2, "devices_per_node": 1}
    plan, _ = build_plan(make_job(layout=LAYOUT, cluster=cluster))
    assert plan.host_memory.ranks == 1
    assert plan.host_memory.snapshot_bytes == plan.ranks[0].snapshot_bytes


@pytest.mark.parametrize("elastic", [{"snapshot_every": 0}, {"restarts": 0}])
def test_a_job_without_snapshots_has_none_in_its_plan(make_job, elastic):
    plan, _ = build_plan(make_job(layout=LAYOUT, elastic=elastic))
    assert plan.host_memory.snapshot_bytes == 0
    assert plan.host_memory.snapshots_off == ""


def test_the_last_byte_decides(make_job, tmp_path):
    """Snapshots fit a node with just the memory that is needed, and not one with a byte less per device."""
    plan, _ = build_plan(make_job(layout=LAYOUT, cluster=ON_CPU))
    host, devices = plan.host_memory, plan.job.cluster.devices_per_node
    assert host.staging_bytes == sum(rank.staging_bytes for rank in plan.ranks) > 0
    assert host.collective_bytes == collective_bytes(plan.job, range(2)) > 0
    always = host.training_bytes + host.collective_bytes
    needed = -(-(host.snapshot_bytes + host.staging_bytes + always) // devices)
    fits, _ = build_plan(make_job(layout=LAYOUT, cluster={"device": "cpu", "host_memory_bytes": needed}))
    assert fits.host_memory.snapshots_off == ""
    tight = {"device": "cpu", "host_memory_bytes": needed - 1}
    short, _ = build_plan(make_job(layout=LAYOUT, cluster=tight))
    reason = short.host_memory.snapshots_off
    assert reason.startswith("those of 2 ranks need ")
    assert "of CPU memory per node, which has" in reason
    assert "; training takes " in reason
    assert "; the shared memory of collectives takes " in reason
    assert f"in-memory snapshots off: {reason}" in short.reasons
    assert [rank.snapshot_bytes for rank in short.ranks] == [0, 0]
    assert short.host_memory.snapshot_bytes == host.snapshot_bytes, "what they would need"
    assert summarize_plan(short)["host_memory"] == dataclasses.asdict(short.host_memory)
    write_plan(short, tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml") == short


def test_checkpoints_are_synchronous_where_a_copy_of_the_state_does_not_fit(make_job):
    plan, _ = build_plan(make_job(layout=LAYOUT, cluster=ON_CPU))
    host, devices = plan.host_memory, plan.job.cluster.devices_per_node
    needed = -(-(host.staging_bytes + host.training_bytes + host.collective_bytes) // devices)
    tight = {"device": "cpu", "host_memory_bytes": needed - 1}
    short, _ = build_plan(make_job(layout=LAYOUT, cluster=tight))
    assert short.host_memory.staging_off.startswith("copies of the state of 2 ranks need ")
    assert [rank.staging_bytes for rank in short.ranks] == [0, 0]
    assert any(reason.startswith("checkpoints are synchronous: ") for reason in short.reasons)
    off, _ = build_plan(make_job(layout=LAYOUT, cluster=ON_CPU, checkpoint={"asynchronous": False}))
    assert off.host_memory.staging_bytes == 0


@pytest.mark.parametrize(
    "layout", [{"dp_replicate": 3}, {"dp_shard": 2}, {"tp": 2, "dp_shard": 2, "zero": 1}]
)
def test_staging_memory_is_that_of_the_chunks_that_a_rank_writes(make_job, layout):
    job = make_job(layout={"micro_batch": 1, **layout}, cluster=ON_CPU)
    for rank in range(job.layout.world_size):
        written = staging_bytes(chunk.bytes for chunk in written_chunks(job, rank))
        assert predict_staging_bytes(job, rank) == pytest.approx(written, rel=0.02)


def test_snapshots_of_two_layouts_are_in_memory_while_the_layout_changes(make_job):
    """They turn nothing off: they stay only until the ranks of the next layout have loaded their state."""
    elastic = {"may_change": "data"}
    plan, _ = build_plan(make_job(layout=LAYOUT, cluster=ON_CPU, elastic=elastic))
    host, devices = plan.host_memory, plan.job.cluster.devices_per_node
    assert host.changing_bytes == host.snapshot_bytes > 0
    assert build_plan(make_job(layout=LAYOUT, cluster=ON_CPU))[0].host_memory.changing_bytes == 0
    always = host.training_bytes + host.collective_bytes
    needed = -(-(host.snapshot_bytes + host.staging_bytes + always) // devices)
    tight = {"device": "cpu", "host_memory_bytes": needed}
    fits, _ = build_plan(make_job(layout=LAYOUT, cluster=tight, elastic=elastic))
    assert (fits.host_memory.snapshots_off, fits.host_memory.changing_bytes) == ("", host.snapshot_bytes)


def test_the_plan_of_a_next_layout_has_the_snapshots_of_the_one_before(make_job):
    elastic = {"may_change": "data"}
    before = build_plan(make_job(layout=LAYOUT, cluster=ON_CPU, elastic=elastic))[0].host_memory
    alone = make_job(layout={"dp_replicate": 1}, cluster=ON_CPU, elastic=elastic)
    following = follow_layout(build_plan(alone)[0].host_memory, before)
    assert following.changing_bytes == before.snapshot_bytes == 2 * following.snapshot_bytes
    off = dataclasses.replace(before, snapshots_off="too little memory")
    assert follow_layout(following, off).changing_bytes == 0


def test_offloaded_state_takes_room_on_a_gpu_node(make_job):
    """Without a known room snapshots are assumed to fit."""
    cluster = {"device": "cuda", "host_memory_bytes": None}
    job = make_job(layout={**LAYOUT, "offload": "optimizer"}, cluster=cluster)
    plan, _ = build_plan(job)
    assert plan.host_memory.offloaded_bytes == sum(r.state_bytes["optimizer"] for r in plan.ranks)
    assert (plan.host_memory.training_bytes, plan.host_memory.room_bytes) == (0, 0)
    assert plan.host_memory.snapshots_off == ""
