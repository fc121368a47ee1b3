"""Joins the ranks: process group, axes, device. Groups are passed on from here, never kept in a global."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.launch.environment import GENERATION_VARIABLE, STORE_VARIABLE
from meshwright.plan.parts import TIED_AXIS, find_tied_places, stage_homes
from meshwright.plan.sharding import ALL_DATA
from meshwright.plan.tensor import COPIES_AXIS, count_copies
from meshwright.run.collectives.counter import CollectiveCounter
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

UPWARDS = "pp_up"
"""A second group of the ranks of a pipeline, for what goes to lower ones; it counts as ``pp``."""


@dataclass(frozen=True)
class Ranks:
    """This rank's place, and the groups it speaks in."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    control: dist.ProcessGroup | None = None
    joined: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    """Groups that are no axis of the mesh: both axes of data at once, the ranks that share key heads."""
    tp: int = 1
    """Ranks that share each matrix, and read the same samples: the innermost axis."""
    pp: int = 1
    """Ranks of a pipeline, which read the same samples, too: the outermost axis."""
    loss_place: int = 0
    """The place in the pipeline that has the last stage."""

    @property
    def place(self) -> int:
        """Its place in its pipeline."""
        return self.rank // (self.world_size // self.pp)

    @property
    def data_rank(self) -> int:
        """Its place among the ranks that read different samples."""
        return self.rank % (self.world_size // self.pp) // self.tp

    @property
    def speaks(self) -> bool:
        """Whether it is the one of the ranks with the same samples whose loss is counted."""
        return self.rank % self.tp == 0 and self.place == self.loss_place

    @property
    def data_mesh(self) -> DeviceMesh:
        """The axes of data: replicas and shards."""
        assert self.mesh is not None, "one process has no mesh"
        axes = tuple(axis for axis in self.mesh.mesh_dim_names or () if axis not in ("pp", "tp"))
        return self.mesh if axes == self.mesh.mesh_dim_names else self.mesh[axes]

    def channel(self, source: int, target: int) -> dist.ProcessGroup:
        """The group through which one place of the pipeline sends to another.

        Up and down the ranks have a group each: between two ranks every message of a group then goes the same
        way, and arrives in the order of the sends. NCCL would wait for ever where both sent first.
        """
        return self.group("pp" if source < target else UPWARDS)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of a mesh axis, or of several ranks that are none."""
        if axis in self.joined:
            return self.joined[axis]
        assert self.mesh is not None, f"one process has no group for {axis}"
        return self.mesh.get_group(axis)

    def add_up(self, values: Sequence[Tensor | float]) -> list[float]:
        """Sum small control values over all ranks: every rank sends its own and gets the sums.

        One process gets its own values back and calls nothing.
        """
        with torch.no_grad():
            scalars = [torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in values]
            summed = torch.stack(scalars)
            if self.control is not None:
                dist.all_reduce(summed, group=self.control)
            return summed.tolist()


def join_ranks(
    job: Job,
    counter: CollectiveCounter,
    store: dist.Store | None = None,
    rank: int | None = None,
    backend: str | None = None,
) -> Ranks:
    """Meet the other ranks and name the axes; one process meets nobody.

    Args:
        job: The settled job.
        counter: Learns which group is which axis.
        store: Where the ranks meet; by default the supervisor's, under this attempt's generation.
        rank: Who this process is; by default what the launcher says.
        backend: Of the groups, if not the device's own.
    """
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    world_size = job.layout.world_size
    device = _device(job, int(os.environ.get("LOCAL_RANK", "0")))
    if world_size == 1:
        return Ranks(rank, 1, device)
    timeout = timedelta(seconds=job.survive.collective_timeout_s)
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    store = store or _supervisor_store(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    assert dist.get_world_size() == world_size, (
        f"{dist.get_world_size()} ranks came, {world_size} were planned"
    )
    layout = job.layout
    degrees = {axis: getattr(layout, axis) for axis in ("pp", "dp_replicate", "dp_shard", "tp")}
    axes = {axis: degree for axis, degree in degrees.items() if degree > 1}
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    control = dist.new_group(timeout=timeout)
    for axis in axes:
        counter.name_axis(mesh.get_group(axis), axis)
    counter.name_axis(control, "control")
    joined = {}
    for axis, members in _joined_ranks(job):
        if (group := _group_of(rank, members, timeout)) is not None:
            joined[axis] = group
            counter.name_axis(group, "pp" if axis == UPWARDS else axis)
    loss_place = stage_homes(job)[-1] if layout.pp > 1 else 0
    return Ranks(rank, world_size, device, mesh, control, joined, layout.tp, layout.pp, loss_place)


def _joined_ranks(job: Job) -> Iterator[tuple[str, list[list[int]]]]:
    """Groups beside the axes of the mesh: a name, and all ranks by group."""
    layout, everybody = job.layout, range(job.layout.world_size)
    inner = layout.world_size // layout.pp
    if layout.zero == 1 and layout.dp_replicate > 1:
        starts = [place * inner + first for place in range(layout.pp) for first in range(layout.tp)]
        yield ALL_DATA, [list(everybody[s : s - s % inner + inner : layout.tp]) for s in starts]
    copies = count_copies(job.model, layout.tp) if isinstance(job.model, DecoderModel) else 1
    if copies > 1:
        yield COPIES_AXIS, [list(everybody[first : first + copies]) for first in everybody[::copies]]
    if layout.pp > 1:
        lines = [list(everybody[first::inner]) for first in range(inner)]
        yield UPWARDS, lines
        ends = find_tied_places(job)
        if len(ends) > 1:
            yield TIED_AXIS, [[line[place] for place in ends] for line in lines]


def _group_of(rank: int, members: Iterable[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """This rank's group, if it is in one; every rank takes part in making all of them."""
    made = [(ranks, dist.new_group(ranks, timeout=timeout)) for ranks in members]
    return next((group for ranks, group in made if rank in ranks), None)


def _supervisor_store(timeout: timedelta) -> dist.Store:
    host, port = os.environ[STORE_VARIABLE].rsplit(":", 1)
    client = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
    return dist.PrefixStore(f"generation-{os.environ[GENERATION_VARIABLE]}", client)


def leave_ranks(ranks: Ranks) -> None:
    """Close the groups."""
    if ranks.mesh is not None:
        dist.destroy_process_group()


@overload
def move(array: Tensor, device: torch.device) -> Tensor: ...
@overload
def move(array: Tensor | None, device: torch.device) -> Tensor | None: ...
def move(array: Tensor | None, device: torch.device) -> Tensor | None:
    """A part of a batch to the device, without waiting where the memory is pinned; None stays None."""
    if array is not None and device.type == "cuda":
        return array.pin_memory().to(device, non_blocking=True)
    return array


def _device(job: Job, local_rank: int) -> torch.device:
    if job.cluster.device == "cuda":
        device = torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")
