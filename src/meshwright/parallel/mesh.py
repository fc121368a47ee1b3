"""The mesh: process groups by axis, this rank's coordinates, its device.

Groups are passed on from here. No module keeps one in a global.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.launch.environment import STORE_VARIABLE
from meshwright.layout.pipeline_schedules import stage_pp_ranks
from meshwright.layout.process_groups import PP_UPSTREAM, list_process_groups
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.measure.flight_recorder import FlightRecorder
from meshwright.parallel.shared_memory.host import HostRanks
from meshwright.parallel.shared_memory.transport import SharedMemoryTransport
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout


class ControlAllReduce:
    """Handle of the control all-reduce: its result on the device, and its copy in CPU memory."""

    def __init__(self, values: Tensor) -> None:
        """Take the result; the copy to the CPU is not started.

        Args:
            values: Float64, one dim.
        """
        self.values = values
        """On the device."""
        self._copy = values
        self._copied: torch.cuda.Event | None = None

    def start_copy(self) -> None:
        """Start the copy to the CPU. On a GPU it is asynchronous."""
        if self.values.is_cuda and self._copied is None:
            self._copy = torch.empty(self.values.shape, dtype=self.values.dtype, pin_memory=True)
            self._copy.copy_(self.values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> list[float]:
        """The values. Waits for the copy, not for work that was queued after ``start_copy``."""
        self.start_copy()
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy.tolist()


@dataclass(frozen=True)
class Mesh:
    """This rank's coordinates and its process groups."""

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    """All ranks, for small control values; None for one process."""
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    """This rank's groups, by axis."""
    layout: Layout = field(default_factory=Layout)
    loss_pp_rank: int = 0
    """The pp rank with the last stage, which computes the loss."""
    transport: SharedMemoryTransport | None = None
    """Runs the collectives of groups whose ranks share a host; None if the backend runs all."""
    flight: FlightRecorder | None = None
    """Records the collectives; None for one process."""

    @property
    def transport_name(self) -> str:
        """What runs the collectives: ``none`` for one rank, ``nccl``, ``gloo`` or ``shared_memory``."""
        if self.control is None:
            return "none"
        return dist.get_backend(self.control) if self.transport is None else "shared_memory"

    @property
    def pp(self) -> int:
        """Size of the pp axis, the outermost one. Its ranks read the same samples."""
        return self.layout.pp

    @property
    def pp_rank(self) -> int:
        """Rank on the pp axis."""
        return self.rank // (self.world_size // self.pp)

    @property
    def dp_rank(self) -> int:
        """Rank among those that read different samples. Ranks of ``cp`` and ``tp`` share samples."""
        return self.rank % (self.world_size // self.pp) // (self.layout.cp * self.layout.tp)

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's loss is counted: one of the ranks that compute the loss of the same tokens."""
        return self.rank % self.layout.tp == 0 and self.pp_rank == self.loss_pp_rank

    def fsdp_mesh(self, shard_axis: str) -> DeviceMesh:
        """The device mesh for FSDP2: the shard axis, after ``dp_replicate`` for hybrid sharding (HSDP)."""
        shards = self.group(shard_axis)
        if self.layout.dp_replicate == 1:
            return DeviceMesh.from_group(shards, self.device.type, mesh_dim_names=(shard_axis,))
        replicas = self.group("dp_replicate")
        # Replicas have a constant stride in global ranks.
        offsets = [r - self.rank for r in dist.get_process_group_ranks(replicas)]
        ranks = [[r + offset for r in dist.get_process_group_ranks(shards)] for offset in offsets]
        names = ("dp_replicate", shard_axis)
        return DeviceMesh.from_group(
            [replicas, shards], self.device.type, mesh=torch.tensor(ranks), mesh_dim_names=names
        )

    def pp_group(self, source: int, target: int) -> dist.ProcessGroup:
        """The group in which pp rank ``source`` sends to pp rank ``target``.

        Each direction has its own group. Between two ranks all messages of a group then go one way and arrive
        in the order of the sends. With one group NCCL would deadlock where both ranks send first.
        """
        return self.group("pp" if source < target else PP_UPSTREAM)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of an axis, or of axes joined by ``+``."""
        assert axis in self.groups, f"no group for {axis or 'no axis'}: there are {list(self.groups)}"
        return self.groups[axis]

    def all_reduce_scalars(
        self, values: Sequence[Tensor | float], local_values: Sequence[Tensor] = ()
    ) -> list[float]:
        """Run the control all-reduce and wait for it; see :meth:`start_control_all_reduce`."""
        return self.start_control_all_reduce(values, local_values).wait()

    def start_control_all_reduce(
        self, values: Sequence[Tensor | float], local_values: Sequence[Tensor] = ()
    ) -> ControlAllReduce:
        """All-reduce small control values: every rank sends its values and gets the sums.

        One process gets its own values back, without a collective. The CPU waits for a GPU once, in ``wait``.

        Args:
            values: Scalars to sum. Python numbers are written on the device, as a copy would synchronize.
            local_values: Device scalars to read back in the same copy. They are not summed and come last.
        """
        with torch.no_grad():
            scalars = [v if isinstance(v, Tensor) else self._fill(v) for v in values]
            summed = torch.stack([scalar.to(self.device, torch.float64) for scalar in scalars])
            if self.control is not None:
                dist.all_reduce(summed, group=self.control)
            local = [scalar.to(self.device, torch.float64).view(1) for scalar in local_values]
            return ControlAllReduce(torch.cat((summed, *local)) if local else summed)

    def _fill(self, value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float64, device=self.device)


def init_mesh(
    job: Job,
    counter: CollectiveCounter,
    store: dist.Store | None = None,
    rank: int | None = None,
    backend: str | None = None,
) -> Mesh:
    """Create the process groups of a job. One process creates none.

    Args:
        job: The settled job.
        counter: Registers the axis of every group.
        store: For the rendezvous; by default the file that the agent names.
        rank: This process; by default ``RANK`` of the environment.
        backend: Backend of the groups; by default NCCL on GPUs and gloo on CPUs.
    """
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    world_size = job.layout.world_size
    device = _device(job, int(os.environ.get("LOCAL_RANK", "0")))
    if world_size == 1:
        return Mesh(rank, 1, device)
    timeout = timedelta(seconds=job.elastic.collective_timeout_s)
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    if store is None:
        store = dist.FileStore(os.environ[STORE_VARIABLE], world_size)
        store.set_timeout(timeout)
    with contextlib.closing(HostRanks(job, store, rank, backend)) as host_ranks:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        assert dist.get_world_size() == world_size, f"{dist.get_world_size()} ranks, planned {world_size}"
        control = dist.new_group(timeout=timeout)
        counter.name_axis(control, "control")
        groups, all_groups = {}, [list(range(world_size))]
        for axis, members in list_process_groups(job):
            all_groups += members
            if (group := _new_group(rank, members, timeout)) is not None:
                groups[axis] = group
                counter.name_axis(group, "pp" if axis == PP_UPSTREAM else axis)
        own = (control, *groups.values())
        transport = counter.transport = host_ranks.open_transport(own, all_groups, counter.flight.observe)
    loss_pp_rank = stage_pp_ranks(job)[-1] if job.layout.pp > 1 else 0
    return Mesh(
        rank, world_size, device, control, groups, job.layout, loss_pp_rank, transport, counter.flight
    )


def _new_group(rank: int, members: Iterable[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """Create all groups of an axis, on every rank. Returns the one that this rank is in, if any."""
    created = [(ranks, dist.new_group(ranks, timeout=timeout)) for ranks in members]
    return next((group for ranks, group in created if rank in ranks), None)


def destroy_mesh(mesh: Mesh) -> None:
    """Destroy the process groups, and close their transport."""
    if mesh.transport is not None:
        mesh.transport.close()
    if mesh.control is not None:
        dist.destroy_process_group()


@overload
def to_device(tensor: Tensor, device: torch.device) -> Tensor: ...
@overload
def to_device(tensor: Tensor | None, device: torch.device) -> Tensor | None: ...
def to_device(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    """Copy a tensor of a batch to the device, asynchronously on a GPU. None stays None."""
    if tensor is not None and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def _device(job: Job, local_rank: int) -> torch.device:
    if job.cluster.device == "cuda":
        device = torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")
