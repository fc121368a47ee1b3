"""The axes over which state is sharded and gradients are reduced.

Planner and runtime share this module, so that an axis name means the same ranks in both. Ranks are numbered
through two meshes, outermost axis first:

=======  ===============================================================
dense    ``pp``, ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``
experts  ``pp``, ``dp_replicate``, ``ep_shard``, ``ep``
=======  ===============================================================

``ep`` x ``etp`` consecutive ranks split the experts, with ``etp`` innermost. The axis is called ``ep`` even
if only ``etp`` is above 1. Ranks with the same index in these groups have the same experts: ``ep_shard``. A
flattened axis has the names of its degrees above 1, joined by ``+`` in mesh order.

=====  ==============================  ==================================================================
stage  state is sharded over           gradients are all-reduced over
=====  ==============================  ==================================================================
0      nothing                         ``dp_replicate`` x ``cp``; experts: ``dp_replicate`` x ``ep_shard``
1      ``dp_shard`` x ``cp``           ``dp_replicate`` x ``dp_shard`` x ``cp``
       experts: ``ep_shard``           experts: ``dp_replicate`` x ``ep_shard``
2, 3   as for stage 1                  ``dp_replicate``, after the reduce-scatter over the shards
=====  ==============================  ==================================================================

Experts have separate axes with ``ep``, ``etp`` or ``tp`` above 1. Otherwise they are treated like other
parameters.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from meshwright.layout.parameters import EXPERTS_PREFIX
from meshwright.spec.job import Job
from meshwright.spec.layout import AXES, Layout
from meshwright.spec.model import DecoderModel

EXPERT_AXIS = "ep"
"""The ranks that split the experts of a layer, including ``etp``."""
EXPERT_SHARD_AXIS = "ep_shard"
"""The ranks with the same experts."""
INTRA_NODE_AXIS = "intra_node"
"""The ranks of a node that reduce the same gradients, in a hierarchical all-reduce."""
INTER_NODE_AXIS = "inter_node"
"""The ranks of all nodes with the same shard of the gradients, in a hierarchical all-reduce."""


class Axis(NamedTuple):
    """A mesh axis or a flattened one; its name is empty if its size is 1."""

    name: str
    size: int


def dense_shard_axis(layout: Layout) -> Axis:
    """The axis that shards dense state (all but routed experts)."""
    return _join(layout, "dp_shard", "cp") if layout.zero else Axis("", 1)


def dense_reduce_axis(layout: Layout) -> Axis:
    """The axis that all-reduces dense gradients: full ones, or shards under ZeRO-2 and 3."""
    if layout.zero >= 2:
        return _join(layout, "dp_replicate")
    return _join(layout, "dp_replicate", "dp_shard", "cp")


def expert_axis(layout: Layout) -> Axis:
    """The axis that splits the experts of a layer."""
    return _join(layout, EXPERT_AXIS)


def expert_shard_axis(layout: Layout) -> Axis:
    """The axis that shards the state of experts with separate axes."""
    return _join(layout, EXPERT_SHARD_AXIS) if layout.zero else Axis("", 1)


def expert_reduce_axis(layout: Layout) -> Axis:
    """The axis that all-reduces the gradients of experts with separate axes."""
    if layout.zero >= 2:
        return _join(layout, "dp_replicate")
    return _join(layout, "dp_replicate", EXPERT_SHARD_AXIS)


def sequence_axis(layout: Layout) -> Axis:
    """The ranks that split the tokens of a sequence for routing."""
    return _join(layout, "cp", "tp")


def has_experts(job: Job) -> bool:
    """Whether the model has layers with experts."""
    return isinstance(job.model, DecoderModel) and job.model.expert_layers > 0


def has_expert_axes(job: Job) -> bool:
    """Whether routed experts have separate axes."""
    return has_experts(job) and expert_axis(job.layout).size * job.layout.tp > 1


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to routed experts."""
    return f".{EXPERTS_PREFIX}." in name


def state_axis(job: Job, name: str) -> Axis:
    """The axis that shards a parameter's optimizer state, and from ZeRO-2 on the parameter itself."""
    apart = is_expert(name) and has_expert_axes(job)
    return expert_shard_axis(job.layout) if apart else dense_shard_axis(job.layout)


def gradient_axis(job: Job, name: str) -> Axis:
    """The axis that all-reduces a parameter's gradient."""
    apart = is_expert(name) and has_expert_axes(job)
    return expert_reduce_axis(job.layout) if apart else dense_reduce_axis(job.layout)


def reduces_full_grads(job: Job) -> bool:
    """Whether full gradients are all-reduced in buckets (ZeRO-0 and 1)."""
    layout = job.layout
    axes = [dense_reduce_axis(layout), *([expert_reduce_axis(layout)] if has_expert_axes(job) else ())]
    return layout.zero < 2 and max(axis.size for axis in axes) > 1


def is_sharded(job: Job) -> bool:
    """Whether a rank has only a part of the state. Norms and checkpoints then need collectives."""
    layout = job.layout
    shards, experts = dense_shard_axis(layout).size, expert_axis(layout).size
    return max(layout.pp, layout.tp, shards, experts) > 1


def list_group_axes(job: Job) -> list[str]:
    """The axes that need a process group: those above 1, and the one over which FSDP2 shards experts.

    FSDP2 needs a group even of a single rank.
    """
    layout = job.layout
    axes = [*(_join(layout, name) for name in ("pp", "cp", "tp"))]
    axes += [dense_shard_axis(layout), dense_reduce_axis(layout)]
    if has_experts(job):
        axes += [expert_axis(layout), sequence_axis(layout)]  # token dispatch, and load statistics
    if has_expert_axes(job):
        axes += [expert_shard_axis(layout), expert_reduce_axis(layout)]
    names = [axis.name for axis in axes if axis.size > 1]
    if layout.zero >= 2 and has_expert_axes(job):
        names.append(EXPERT_SHARD_AXIS)
    return list(dict.fromkeys(names))


def list_rank_groups(layout: Layout, name: str) -> list[list[int]]:
    """The rank groups of an axis; each list is in the order of the axis."""
    names, offsets, starts, stride = set(name.split("+")), [0], [0], 1
    for axis, degree in reversed(_mesh_of(layout, names).items()):
        before = offsets if axis in names else starts
        before[:] = [index * stride + rank for index in range(degree) for rank in before]
        stride *= degree
    return [[start + offset for offset in offsets] for start in starts]


def axis_rank(layout: Layout, rank: int, name: str) -> int:
    """The index of a rank on an axis; 0 on an axis without a name."""
    return _locate(layout, rank, name)[0] if name else 0


def _mesh_of(layout: Layout, names: set[str]) -> dict[str, int]:
    """The mesh with these axes and its degrees, outermost first."""
    if names & {EXPERT_AXIS, EXPERT_SHARD_AXIS}:
        experts = layout.ep * layout.etp
        shards = layout.dp_shard * layout.cp * layout.tp // experts
        degrees = (layout.pp, layout.dp_replicate, shards, experts)
        return dict(zip(("pp", "dp_replicate", EXPERT_SHARD_AXIS, EXPERT_AXIS), degrees, strict=True))
    return {axis: getattr(layout, axis) for axis in AXES}


@functools.lru_cache(maxsize=4096)
def _join(layout: Layout, *names: str) -> Axis:
    mesh = _mesh_of(layout, set(names))
    return Axis("+".join(n for n in names if mesh[n] > 1), math.prod(mesh[n] for n in names))


@functools.lru_cache(maxsize=4096)
def _locate(layout: Layout, rank: int, name: str) -> tuple[int, tuple[int, ...]]:
    """The index of a rank on the axis, and its indices on all others."""
    names = set(name.split("+"))
    inside, width, outside = 0, 1, []
    for axis, degree in reversed(_mesh_of(layout, names).items()):
        rank, index = divmod(rank, degree)
        if axis in names:
            inside, width = inside + index * width, width * degree
        else:
            outside.append(index)
    return inside, tuple(reversed(outside))


def uses_ddp(job: Job) -> bool:
    """Whether torch's DDP all-reduces the gradients: no pipeline, expert axes or backup replicas."""
    layout = job.layout
    if layout.zero >= 2 or layout.pp > 1 or layout.backup_replicas or has_expert_axes(job):
        return False
    return dense_reduce_axis(layout).size > 1
