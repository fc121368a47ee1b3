"""Over which ranks a parameter's state is cut and its gradients are summed: the one table of axes.

Planner and runner both ask here, so that they name the same axis and mean the same ranks. Ranks are counted
through two meshes, outermost axis first:

=======  ===============================================================
dense    ``pp``, ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``
experts  ``pp``, ``dp_replicate``, ``ep_shard``, ``ep``
=======  ===============================================================

``ep`` x ``etp`` consecutive ranks share the experts; ``etp`` is the inner one, and the axis is called ``ep``
where it is alone, too. Ranks at the same place of these groups hold the same experts: ``ep_shard``. Several
axes at once are called by the names of those above one, joined by ``+``, in the order of the mesh.

=====  ==============================  ==================================================================
stage  state is cut over               gradients are all-reduced over
=====  ==============================  ==================================================================
0      nothing                         ``dp_replicate`` x ``cp``; experts: ``dp_replicate`` x ``ep_shard``
1      ``dp_shard`` x ``cp``           ``dp_replicate`` x ``dp_shard`` x ``cp``
       experts: ``ep_shard``           experts: ``dp_replicate`` x ``ep_shard``
2, 3   the same as 1                   ``dp_replicate``, once they are reduced and scattered over shards
=====  ==============================  ==================================================================

Experts have axes of their own where their ranks are not those of the rest: with ``ep``, ``etp`` or ``tp``
above one. Elsewhere they are parameters like all others.
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
"""The ranks among which the experts of a layer are dealt, ``etp`` included."""
EXPERT_SHARD_AXIS = "ep_shard"
"""The ranks that hold the same experts."""


class Axis(NamedTuple):
    """Ranks that speak with each other; of size one, without a name, where a rank is alone."""

    name: str
    size: int


def dense_shard_axis(layout: Layout) -> Axis:
    """Over which the state of all but routed experts is cut."""
    return _join(layout, "dp_shard", "cp") if layout.zero else Axis("", 1)


def dense_reduce_axis(layout: Layout) -> Axis:
    """Over which their gradients are all-reduced: whole ones, or under ZeRO-2 and 3 shards."""
    if layout.zero >= 2:
        return _join(layout, "dp_replicate")
    return _join(layout, "dp_replicate", "dp_shard", "cp")


def expert_axis(layout: Layout) -> Axis:
    """Among which the experts of a layer are dealt."""
    return _join(layout, EXPERT_AXIS)


def expert_shard_axis(layout: Layout) -> Axis:
    """Over which the state of experts is cut, where they have axes of their own."""
    return _join(layout, EXPERT_SHARD_AXIS) if layout.zero else Axis("", 1)


def expert_reduce_axis(layout: Layout) -> Axis:
    """Over which the gradients of experts are all-reduced, where they have axes of their own."""
    if layout.zero >= 2:
        return _join(layout, "dp_replicate")
    return _join(layout, "dp_replicate", EXPERT_SHARD_AXIS)


def sequence_axis(layout: Layout) -> Axis:
    """The ranks that work on the same sequences, each on its own tokens, where those are routed."""
    return _join(layout, "cp", "tp")


def has_experts(job: Job) -> bool:
    """Whether some layer of the model routes its tokens."""
    return isinstance(job.model, DecoderModel) and job.model.expert_layers > 0


def has_expert_axes(job: Job) -> bool:
    """Whether routed experts have axes of their own."""
    return has_experts(job) and expert_axis(job.layout).size * job.layout.tp > 1


def is_expert(name: str) -> bool:
    """Whether a parameter is of routed experts."""
    return f".{EXPERTS_PREFIX}." in name


def state_axis(job: Job, name: str) -> Axis:
    """Over which a parameter's rows are cut: of the optimizer's state, from ZeRO-2 on of everything."""
    apart = is_expert(name) and has_expert_axes(job)
    return expert_shard_axis(job.layout) if apart else dense_shard_axis(job.layout)


def gradient_axis(job: Job, name: str) -> Axis:
    """Over which a parameter's gradient is all-reduced."""
    apart = is_expert(name) and has_expert_axes(job)
    return expert_reduce_axis(job.layout) if apart else dense_reduce_axis(job.layout)


def reduces_full_grads(job: Job) -> bool:
    """Whether whole gradients of some parameters are summed with other ranks', in buckets (ZeRO-0 and 1)."""
    layout = job.layout
    axes = [dense_reduce_axis(layout), *([expert_reduce_axis(layout)] if has_expert_axes(job) else ())]
    return layout.zero < 2 and max(axis.size for axis in axes) > 1


def is_sharded(job: Job) -> bool:
    """Whether a rank's state is not all of the model's: all ranks take part in norms and checkpoints."""
    layout = job.layout
    shards, experts = dense_shard_axis(layout).size, expert_axis(layout).size
    return max(layout.pp, layout.tp, shards, experts) > 1


def list_group_axes(job: Job) -> list[str]:
    """The axes that a run communicates over: those above one, and those over which FSDP2 cuts the experts.

    It wants a group also where a rank is alone.
    """
    layout = job.layout
    axes = [*(_join(layout, name) for name in ("pp", "cp", "tp"))]
    axes += [dense_shard_axis(layout), dense_reduce_axis(layout)]
    if has_experts(job):
        axes += [expert_axis(layout), sequence_axis(layout)]  # to them, and to balance them
    if has_expert_axes(job):
        axes += [expert_shard_axis(layout), expert_reduce_axis(layout)]
    names = [axis.name for axis in axes if axis.size > 1]
    if layout.zero >= 2 and has_expert_axes(job):
        names.append(EXPERT_SHARD_AXIS)
    return list(dict.fromkeys(names))


def list_rank_groups(layout: Layout, name: str) -> list[list[int]]:
    """All ranks, by the group of an axis that each is in; every list is in the order of the axis."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        _, outside = _locate(layout, rank, name)
        groups.setdefault(outside, []).append(rank)
    return list(groups.values())


def axis_rank(layout: Layout, rank: int, name: str) -> int:
    """A rank's place in its group of an axis; 0 on an axis without a name, where it is alone."""
    return _locate(layout, rank, name)[0] if name else 0


def _mesh_of(layout: Layout, names: set[str]) -> dict[str, int]:
    """The mesh that has these axes, with its degrees, outermost first."""
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
    """A rank's place on the axis, and its places on all others."""
    names = set(name.split("+"))
    inside, width, outside = 0, 1, []
    for axis, degree in reversed(_mesh_of(layout, names).items()):
        rank, place = divmod(rank, degree)
        if axis in names:
            inside, width = inside + place * width, width * degree
        else:
            outside.append(place)
    return inside, tuple(reversed(outside))


def uses_ddp(job: Job) -> bool:
    """Whether torch's DDP sums the gradients: not in a pipeline, nor where experts have axes of their own."""
    layout = job.layout
    return (
        dense_reduce_axis(layout).size > 1 and layout.zero < 2 and layout.pp == 1 and not has_expert_axes(job)
    )
