"""The widest link that an axis crosses, on nodes and racks of the cluster."""

from __future__ import annotations

import pytest

from meshwright.layout.placement import tier_of
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
