"""Joins the ranks: process group, axes, device. Groups are passed on from here, never kept in a global."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.launch.environment import GENERATION_VARIABLE, STORE_VARIABLE
from meshwright.plan.sharding import ALL_DATA
from meshwright.run.collectives.counter import CollectiveCounter
from meshwright.spec.job import Job


@dataclass(frozen=True)
class Ranks:
    """This rank's place, and the groups it speaks in."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    control: dist.ProcessGroup | None = None
    all_data: dist.ProcessGroup | None = None
    """All ranks, for gradients, where replicas and shards are two axes and one reduction goes over both."""

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of a mesh axis, or of both axes of data at once."""
        if axis == ALL_DATA:
            assert self.all_data is not None, f"this layout has no group for {axis}"
            return self.all_data
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
    axes = {axis: getattr(layout, axis) for axis in ("dp_replicate", "dp_shard") if getattr(layout, axis) > 1}
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    control = dist.new_group(timeout=timeout)
    for axis in axes:
        counter.name_axis(mesh.get_group(axis), axis)
    counter.name_axis(control, "control")
    all_data = None
    if layout.zero == 1 and len(axes) == 2:
        all_data = dist.new_group(timeout=timeout)
        counter.name_axis(all_data, ALL_DATA)
    return Ranks(rank, world_size, device, mesh, control, all_data)


def _supervisor_store(timeout: timedelta) -> dist.Store:
    host, port = os.environ[STORE_VARIABLE].rsplit(":", 1)
    client = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
    return dist.PrefixStore(f"generation-{os.environ[GENERATION_VARIABLE]}", client)


def leave_ranks(ranks: Ranks) -> None:
    """Close the groups."""
    if ranks.mesh is not None:
        dist.destroy_process_group()


def move(array: Tensor, device: torch.device) -> Tensor:
    """A batch to the device, without waiting where the memory is pinned."""
    if device.type == "cuda":
        return array.pin_memory().to(device, non_blocking=True)
    return array


def _device(job: Job, local_rank: int) -> torch.device:
    if job.cluster.device == "cuda":
        device = torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")
