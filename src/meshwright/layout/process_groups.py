"""The process groups of a layout: all ranks by group, in the order in which every rank creates the groups."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.layout.axes import INTER_NODE_AXIS, INTRA_NODE_AXIS, list_group_axes, list_rank_groups
from meshwright.layout.hierarchy import find_hierarchy
from meshwright.layout.stages import TIED_AXIS, find_tied_pp_ranks
from meshwright.layout.tensor_parallel import KV_REPLICA_AXIS, count_kv_replicas
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

PP_UPSTREAM = "pp_up"
"""A second group of the pp ranks, for sends to lower ranks. Its traffic counts as ``pp``."""
P2P_AXES = ("pp", PP_UPSTREAM)
"""Groups with sends and receives only."""


def list_process_groups(job: Job) -> Iterator[tuple[str, list[list[int]]]]:
    """The axes that a run communicates over, and all ranks by group of each."""
    layout, world = job.layout, range(job.layout.world_size)
    for axis in list_group_axes(job):
        yield axis, list_rank_groups(layout, axis)
    if (hierarchy := find_hierarchy(job)) is not None:
        yield INTRA_NODE_AXIS, list(map(list, hierarchy.intra_node))
        yield INTER_NODE_AXIS, list(map(list, hierarchy.inter_node))
    replicas = count_kv_replicas(job.model, layout.tp) if isinstance(job.model, DecoderModel) else 1
    if replicas > 1:
        yield KV_REPLICA_AXIS, [list(world[first : first + replicas]) for first in world[::replicas]]
    if layout.pp > 1:
        pipelines = list_rank_groups(layout, "pp")
        yield PP_UPSTREAM, pipelines
        ends = find_tied_pp_ranks(job)
        if len(ends) > 1:
            yield TIED_AXIS, [[pipeline[pp_rank] for pp_rank in ends] for pipeline in pipelines]
