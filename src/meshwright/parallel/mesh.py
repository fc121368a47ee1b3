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
from torch.distributed.device_mesh import DeviceMesh

from meshwright.launch.environment import GENERATION_VARIABLE, STORE_VARIABLE
from meshwright.layout.axes import list_group_axes, list_rank_groups
from meshwright.layout.stages import TIED_AXIS, find_tied_pp_ranks, stage_pp_ranks
from meshwright.layout.tensor_parallel import KV_REPLICA_AXIS, count_kv_replicas
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.model import DecoderModel

PP_UPSTREAM = "pp_up"
"""A second group of the ranks of a pipeline, for what goes to lower ones; it counts as ``pp``."""


class ControlAllReduce:
    """Values of the device on their way to the host, in the order of the device's work."""

    def __init__(self, values: Tensor) -> None:
        """Ask for them; on a GPU the host goes on, and what is queued later is not waited for.

        Args:
            values: Float64, in one row.
        """
        self.values = values
        self._h2d_done: torch.cuda.Event | None = None
        if values.is_cuda:
            self.values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self.values.copy_(values, non_blocking=True)
            self._h2d_done = torch.cuda.Event()
            self._h2d_done.record()

    def wait(self) -> list[float]:
        """The values, once they are there."""
        if self._h2d_done is not None:
            self._h2d_done.synchronize()
        return self.values.tolist()


@dataclass(frozen=True)
class Mesh:
    """This rank's place, and the groups it reports_loss in."""

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    """Those that it reports_loss in, by axis."""
    layout: Layout = field(default_factory=Layout)
    loss_pp_rank: int = 0
    """The place in the pipeline that has the last stage."""

    @property
    def pp(self) -> int:
        """Ranks of a pipeline, which read the same samples: the outermost axis."""
        return self.layout.pp

    @property
    def pp_rank(self) -> int:
        """Its place in its pipeline."""
        return self.rank // (self.world_size // self.pp)

    @property
    def dp_rank(self) -> int:
        """Its place among the ranks that read different samples: those of ``cp`` and ``tp`` share theirs."""
        return self.rank % (self.world_size // self.pp) // (self.layout.cp * self.layout.tp)

    @property
    def reports_loss(self) -> bool:
        """Whether it is the one of the ranks with the same tokens whose loss is counted."""
        return self.rank % self.layout.tp == 0 and self.pp_rank == self.loss_pp_rank

    def fsdp_mesh(self, shard_axis: str) -> DeviceMesh:
        """The ranks of data as FSDP2 wants them: those that share a copy of the state, and its replicas."""
        shards = self.group(shard_axis)
        if self.layout.dp_replicate == 1:
            return DeviceMesh.from_group(shards, self.device.type, mesh_dim_names=(shard_axis,))
        replicas = self.group("dp_replicate")
        # Replicas lie equally far apart: rank r of a copy is r's neighbour in all others.
        first = [r - self.rank for r in dist.get_process_group_ranks(replicas)]
        ranks = [[r + more for r in dist.get_process_group_ranks(shards)] for more in first]
        names = ("dp_replicate", shard_axis)
        return DeviceMesh.from_group(
            [replicas, shards], self.device.type, mesh=torch.tensor(ranks), mesh_dim_names=names
        )

    def pp_group(self, source: int, target: int) -> dist.ProcessGroup:
        """The group through which one place of the pipeline sends to another.

        Up and down the ranks have a group each: between two ranks every message of a group then goes the same
        way, and arrives in the order of the sends. NCCL would wait for ever where both sent first.
        """
        return self.group("pp" if source < target else PP_UPSTREAM)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of an axis, or of axes joined by ``+``."""
        assert axis in self.groups, f"no group for {axis or 'nothing'}: there are {list(self.groups)}"
        return self.groups[axis]

    def all_reduce_scalars(
        self, values: Sequence[Tensor | float], beside: Sequence[Tensor] = ()
    ) -> list[float]:
        """Sum small control values over all ranks and wait; see :meth:`start_control_all_reduce`."""
        return self.start_control_all_reduce(values, beside).wait()

    def start_control_all_reduce(
        self, values: Sequence[Tensor | float], beside: Sequence[Tensor] = ()
    ) -> ControlAllReduce:
        """Sum small control values over all ranks: every rank sends its own and gets the sums.

        One process gets its own values back and calls nothing. The host waits for a GPU once, when it asks
        for the sums: its own values are filled in there, as a copy of each would wait, too.

        Args:
            values: Those to sum.
            beside: Values of the device to read at the same time; they are not summed, and come last.
        """
        with torch.no_grad():
            scalars = [v if isinstance(v, Tensor) else self._fill(v) for v in values]
            summed = torch.stack([scalar.to(self.device, torch.float64) for scalar in scalars])
            if self.control is not None:
                dist.all_reduce(summed, group=self.control)
            own = [scalar.to(self.device, torch.float64).view(1) for scalar in beside]
            return ControlAllReduce(torch.cat((summed, *own)) if own else summed)

    def _fill(self, value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float64, device=self.device)


def init_mesh(
    job: Job,
    counter: CollectiveCounter,
    store: dist.Store | None = None,
    rank: int | None = None,
    backend: str | None = None,
) -> Mesh:
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
        return Mesh(rank, 1, device)
    timeout = timedelta(seconds=job.elastic.collective_timeout_s)
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    store = store or _supervisor_store(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    assert dist.get_world_size() == world_size, (
        f"{dist.get_world_size()} ranks came, {world_size} were planned"
    )
    layout = job.layout
    control = dist.new_group(timeout=timeout)
    counter.name_axis(control, "control")
    groups = {}
    for axis, members in _list_groups(job):
        if (group := _group_of(rank, members, timeout)) is not None:
            groups[axis] = group
            counter.name_axis(group, "pp" if axis == PP_UPSTREAM else axis)
    loss_pp_rank = stage_pp_ranks(job)[-1] if layout.pp > 1 else 0
    return Mesh(rank, world_size, device, control, groups, layout, loss_pp_rank)


def _list_groups(job: Job) -> Iterator[tuple[str, list[list[int]]]]:
    """The groups that a run of the job reports_loss in: an axis, and all ranks by group."""
    layout, everybody = job.layout, range(job.layout.world_size)
    for axis in list_group_axes(job):
        yield axis, list_rank_groups(layout, axis)
    copies = count_kv_replicas(job.model, layout.tp) if isinstance(job.model, DecoderModel) else 1
    if copies > 1:
        yield KV_REPLICA_AXIS, [list(everybody[first : first + copies]) for first in everybody[::copies]]
    if layout.pp > 1:
        lines = list_rank_groups(layout, "pp")
        yield PP_UPSTREAM, lines
        ends = find_tied_pp_ranks(job)
        if len(ends) > 1:
            yield TIED_AXIS, [[line[pp_rank] for pp_rank in ends] for line in lines]


def _group_of(rank: int, members: Iterable[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """This rank's group, if it is in one; every rank takes part in making all of them."""
    made = [(ranks, dist.new_group(ranks, timeout=timeout)) for ranks in members]
    return next((group for ranks, group in made if rank in ranks), None)


def _supervisor_store(timeout: timedelta) -> dist.Store:
    host, port = os.environ[STORE_VARIABLE].rsplit(":", 1)
    client = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
    return dist.PrefixStore(f"generation-{os.environ[GENERATION_VARIABLE]}", client)


def destroy_mesh(mesh: Mesh) -> None:
    """Close the groups."""
    if mesh.control is not None:
        dist.destroy_process_group()


@overload
def to_device(array: Tensor, device: torch.device) -> Tensor: ...
@overload
def to_device(array: Tensor | None, device: torch.device) -> Tensor | None: ...
def to_device(array: Tensor | None, device: torch.device) -> Tensor | None:
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
