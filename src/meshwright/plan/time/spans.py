"""The spans of process groups whose ranks are placed: which nodes each group covers, by its worst group.

In rank order, where nodes divide groups evenly, all groups of an axis have the span of
``network.span_of_stride``. Other placements, and nodes that do not divide groups, are computed rank by rank.

A ring between nodes is as fast as the network interfaces that it uses. NCCL orders its rings by node and uses
the interface of each of its ranks in a node. Gloo's rings follow the order of ranks, and the cores of a CPU
node share one interface, as wide as theirs together: each edge of a ring that leaves the node takes a part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from meshwright.layout.axes import EXPERT_AXIS, EXPERT_SHARD_AXIS, list_rank_groups
from meshwright.plan.estimate.grid import Floats, Grid, Ints
from meshwright.plan.time.network import Span, list_degrees
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.legality.placement import count_slots_per_node

Members = Mapping[str, Ints]
"""The ranks of each group of the time model, one row per group."""


def needs_spans(job: Job, slots: Sequence[int] = ()) -> bool:
    """Whether a placement differs from what ``network.span_of_stride`` computes."""
    cluster = job.cluster
    if cluster.nodes == 1:
        return False
    if slots:
        return True
    per_node = count_slots_per_node(job)
    sizes = [per_node, per_node * (cluster.nodes_per_rack or cluster.nodes)]
    if job.layout.world_size <= per_node:
        sizes = []
    degrees = list_degrees(Grid.of([job.layout])).values()
    used = [(int(ranks[0]), int(stride[0])) for ranks, stride in degrees if ranks[0] > 1]
    widths = {width for ranks, stride in used for width in (stride, stride * ranks)}
    return any(size % width and width % size for size in sizes for width in widths)


def list_members(layout: Layout) -> Members:
    """The process groups of a layout, by the names of ``network.Groups``."""
    experts = np.array(list_rank_groups(layout, EXPERT_AXIS)).reshape(-1, layout.ep, layout.etp)
    axes = {"tp": "tp", "cp": "cp", "shard": "dp_shard+cp", "replicate": "dp_replicate", "pp": "pp"}
    return {
        **{name: np.array(list_rank_groups(layout, axis)) for name, axis in axes.items()},
        "ep": experts.transpose(0, 2, 1).reshape(-1, layout.ep),
        "etp": experts.reshape(-1, layout.etp),
        "expert_shard": np.array(list_rank_groups(layout, EXPERT_SHARD_AXIS)),
        "world": np.arange(layout.world_size)[None],
    }


def find_spans(job: Job, slots: npt.ArrayLike, members: Members | None = None) -> dict[str, Span]:
    """The spans of several placements of one layout; one element per placement.

    Args:
        job: With the layout.
        slots: One row per placement: the slot of each rank.
        members: Members of the layout, if they are known.
    """
    nodes = np.atleast_2d(np.asarray(slots, dtype=np.int64)) // count_slots_per_node(job)
    found = list_members(job.layout) if members is None else members
    return {name: _find_span(job.cluster, nodes, groups) for name, groups in found.items()}


def _find_span(cluster: Cluster, nodes: Ints, groups: Ints) -> Span:
    """The span of the worst group.

    Args:
        cluster: Its nodes and racks.
        nodes: The node of each rank; one row per placement.
        groups: The ranks of each group; one row per group.
    """
    size, placements = groups.shape[1], len(nodes)
    if size == 1:
        one = np.ones(placements)
        return Span(one, one, one, np.zeros(placements, dtype=np.bool_))
    on = nodes[:, groups]  # placement, group, rank
    ordered = np.sort(on, axis=2)
    is_first = np.concatenate([np.ones((*on.shape[:2], 1), np.bool_), np.diff(ordered, axis=2) > 0], axis=2)
    distinct = is_first.sum(axis=2)
    extent = ordered[:, :, -1] - ordered[:, :, 0]
    covered = np.where(distinct > 1, extent * distinct / np.maximum(distinct - 1, 1), 1.0)
    runs = np.cumsum(is_first.reshape(-1)) - 1
    counts = np.bincount(runs)[runs].reshape(on.shape)
    fewest, most = counts.min(axis=2).astype(float), counts.max(axis=2).astype(float)
    racks = ordered[:, :, [0, -1]] // (cluster.nodes_per_rack or cluster.nodes)
    if cluster.device == "cpu":
        flows = _count_flows(on)
        nics = cluster.devices_per_node / np.where(flows > 0, flows, np.nan)
    else:
        nics = np.where(distinct > 1, fewest, np.inf).min(axis=1)
    return Span(
        np.minimum(covered.max(axis=1), cluster.nodes),
        most.min(axis=1),
        np.where(np.isfinite(nics), nics, 1.0),
        (racks[:, :, 0] != racks[:, :, 1]).any(axis=1),
    )


def _count_flows(on: Ints) -> Floats:
    """Edges of rings in rank order that leave a node, on the node with most of them."""
    leaves = on != np.roll(on, -1, axis=2)
    placements, width = len(on), int(on.max()) + 1
    row = np.arange(placements)[:, None, None] * width
    flows = np.bincount((row + on)[leaves], minlength=placements * width).reshape(placements, width)
    most: Floats = flows.max(axis=1).astype(float)
    return most
