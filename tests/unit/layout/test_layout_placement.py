"""The slots of ranks, and the widest link that an axis crosses, on nodes and racks of the cluster."""

from __future__ import annotations

import pytest

from meshwright.layout.placement import RankPlacement, given_slots, normalize_slots, tier_of
from meshwright.spec.layout import Layout
from meshwright.spec.legality.table import with_layout


@pytest.mark.parametrize(
    ("layout", "axis", "tier"),
    [
        (Layout("given", tp=8, dp_shard=8, zero=1), "tp", "node"),
        (Layout("given", tp=8, dp_shard=2, zero=1), "dp_shard", "rack"),
        (Layout("given", tp=16), "tp", "rack"),
        (Layout("given", tp=8, dp_shard=8, zero=1), "dp_shard", "spine"),
        (Layout("given", pp=2, tp=8, dp_shard=4, zero=1), "pp", "spine"),
        (Layout("given", tp=8), "control", "node"),
        (Layout("given", tp=8, dp_shard=8, zero=1), "control", "spine"),
    ],
    ids=str,
)
def test_group_spans_the_widest_link_of_its_members(make_job, layout, axis, tier):
    """The cluster has eight nodes of eight devices and two nodes per rack. tp is innermost, pp outermost."""
    job = make_job(cluster={"nodes": 8, "nodes_per_rack": 2})
    assert tier_of(with_layout(job, layout), axis) == tier


def test_ranks_that_share_the_cores_of_one_machine_stay_within_the_node(make_job):
    """Four CPU ranks on two cores: the ranks past the cores are not on another node."""
    job = make_job(cluster={"preset": "local", "device": "cpu", "devices_per_node": 2})
    for axis in ("dp_replicate", "control"):
        assert tier_of(with_layout(job, Layout("given", dp_replicate=4)), axis) == "node"


def test_tiers_follow_the_placement_of_ranks(make_job):
    """Two nodes of two devices: with slots 0, 2, 1, 3 the replicas are inside nodes, and tp crosses."""
    job = make_job(cluster={"nodes": 2, "devices_per_node": 2}, layout={"tp": 2, "dp_replicate": 2})
    assert [tier_of(job, axis) for axis in ("tp", "dp_replicate")] == ["node", "rack"]
    assert [tier_of(job, axis, (0, 2, 1, 3)) for axis in ("tp", "dp_replicate")] == ["rack", "node"]


def test_tier_is_that_of_the_group_that_crosses_most(make_job):
    """Nodes of three devices: only the second of three pairs crosses."""
    job = make_job(cluster={"nodes": 2, "devices_per_node": 3}, layout={"tp": 2, "dp_replicate": 3})
    assert tier_of(job, "tp") == "rack"


def test_slots_are_devices_node_by_node(make_job):
    job = make_job(cluster={"nodes": 2, "devices_per_node": 3}, layout={"dp_replicate": 4})
    ordered, placed = RankPlacement.of(job), RankPlacement.of(job, (5, 0, 1, 3))
    assert ordered.as_pairs() == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert placed.as_pairs() == [(1, 2), (0, 0), (0, 1), (1, 0)]
    assert placed.list_nodes() == {0: [1, 2], 1: [3, 0]}
    assert (placed.node_of(0), placed[0].device) == (1, 2)


def test_ranks_that_share_cores_have_a_slot_each(make_job):
    """Five ranks on two nodes of two cores: three slots per node."""
    cluster = {"preset": "local", "device": "cpu", "nodes": 2, "devices_per_node": 2}
    links = {"nic_bytes_per_s": 1e9, "nic_latency_s": 1e-4}
    job = make_job(cluster={**cluster, **links}, layout={"dp_replicate": 5})
    assert RankPlacement.of(job).as_pairs() == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_rank_order_is_empty():
    assert normalize_slots([0, 1, 2]) == ()
    assert normalize_slots([0, 2, 1]) == (0, 2, 1)


def test_layout_names_its_slots_or_leaves_them_open():
    assert given_slots(Layout(placement="auto")) == given_slots(Layout(placement="rank-order")) == ()
    assert given_slots(Layout(placement=(1, 0))) == (1, 0)
