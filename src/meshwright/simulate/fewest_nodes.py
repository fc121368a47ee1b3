"""The fewest nodes on which a job can go on: those on which the planner finds a layout."""

from __future__ import annotations

import math

from meshwright.layout.parameters import count_parameters
from meshwright.plan.memory.fit import usable_bytes
from meshwright.plan.search.find import find_layouts, with_cluster
from meshwright.plan.sizing import CHECKPOINT_BYTES
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

SEARCH_S = 2.0
"""Longest search of one number of nodes, in CPU seconds."""


def does_replan(job: Job, replan: bool | None) -> bool:
    """Whether a run goes on with fewer nodes: as set, else by ``elastic.may_change``."""
    return job.elastic.may_change != "nothing" if replan is None else replan


def replica_nodes(job: Job) -> int:
    """Nodes of one data-parallel replica, by the job's degrees; 1 if the whole layout may change."""
    layout = job.layout
    if job.elastic.may_change == "any":
        return 1
    return math.ceil(layout.pp * layout.cp * layout.tp / job.cluster.devices_per_node)


def least_nodes(job: Job) -> int:
    """A lower bound: weights and optimizer state must fit the memory of all devices."""
    room = job.cluster.devices_per_node * usable_bytes(job.cluster)
    return max(1, math.ceil(CHECKPOINT_BYTES * count_parameters(job.model) / room))


def fewest_nodes(job: Job) -> int | None:
    """The fewest nodes that hold the job without offloading: the lower bound, and doublings of it.

    A job with a given layout needs the nodes of one replica, unless the whole layout may change. None if the
    cluster does not hold the job.
    """
    most = job.cluster.nodes
    if not is_searched(job):
        return min(replica_nodes(job), most)
    nodes = least_nodes(job)
    while nodes < most:
        if holds_model(job, nodes):
            return nodes
        nodes *= 2
    return most if holds_model(job, most) else None


def is_searched(job: Job) -> bool:
    """Whether the planner chooses the layout for fewer nodes."""
    free = job.layout.mode == "auto" or job.elastic.may_change == "any"
    return free and isinstance(job.model, DecoderModel)


def holds_model(job: Job, nodes: int) -> bool:
    """Whether the planner finds a layout without offloading that uses every device of so many nodes."""
    if nodes < least_nodes(job):
        return False
    worlds = [nodes * job.cluster.devices_per_node]
    found = find_layouts(
        with_cluster(job, nodes=nodes), {"offload": "none"}, 1, worlds=worlds, budget_s=SEARCH_S
    )
    return bool(found.best)
