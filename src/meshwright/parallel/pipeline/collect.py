"""Brings what one place of a pipeline has to the first one, where checkpoints are written."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.mesh import Mesh


@torch.no_grad()
def gather_to_first_stage(
    mesh: Mesh, holder: int, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], Tensor]
) -> Tensor:
    """A tensor that one place has, at the first place; every pipeline does this on its own.

    Args:
        mesh: All of them.
        holder: The place that has it.
        shape: Its shape.
        dtype: Its type.
        make: Makes it, at its place.

    Returns:
        The tensor, at the first place and at its own; nothing of it elsewhere.
    """
    if mesh.pp_rank == holder:
        tensor = make()
        if holder:
            sent = tensor.to(mesh.device).contiguous()
            dist.send(sent, group=mesh.pp_group(holder, 0), group_dst=0)
        return tensor
    if mesh.pp_rank == 0:
        tensor = torch.empty(shape, dtype=dtype, device=mesh.device)
        dist.recv(tensor, group=mesh.pp_group(holder, 0), group_src=holder)
        return tensor
    return torch.empty(0, dtype=dtype, device=mesh.device)
