"""The network tier of an axis: within a node, within a rack, or across the spine."""

from __future__ import annotations

from meshwright.layout.axes import list_rank_groups
from meshwright.layout.stages import TIED_AXIS
from meshwright.layout.tensor_parallel import KV_REPLICA_AXIS
from meshwright.spec.job import Job

CONTAINING = {KV_REPLICA_AXIS: "tp", TIED_AXIS: "pp"}
"""Axes that are subsets of another axis."""


def tier_of(job: Job, axis: str) -> str:
    """The tier of the first group of an axis: ``node``, ``rack`` or ``spine``."""
    layout, cluster = job.layout, job.cluster
    if cluster.nodes == 1:  # CPU ranks may share cores: more ranks than devices
        return "node"
    last = layout.world_size - 1
    if axis != "control":
        last = list_rank_groups(layout, CONTAINING.get(axis, axis))[0][-1]
    nodes = last // cluster.devices_per_node + 1
    if nodes == 1:
        return "node"
    return "rack" if nodes <= (cluster.nodes_per_rack or cluster.nodes) else "spine"
