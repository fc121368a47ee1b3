"""Context parallel: ranks of ``cp`` share each sequence and communicate in attention only.

``ring``     ring attention (``ring_attention``): keys and values rotate. Positions are in zig-zag order.
``ulysses``  ``ulysses``: all-to-alls swap positions for heads around attention. Positions are contiguous.

All other modules see a rank's own tokens. A gradient is then a part of a sum, which data parallelism
completes: ``cp`` is one of its axes (``layout.axes``).

Shape suffixes: B batch, T tokens of a sequence on this rank.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from meshwright.models.attention import Context
from meshwright.models.decoder import Decoder
from meshwright.parallel.collectives import all_gather_rows
from meshwright.parallel.mesh import Mesh
from meshwright.spec.job import Job


class ContextParallel(Context):
    """This rank in its ``cp`` group, and its positions of every sequence."""

    def __init__(self, job: Job, mesh: Mesh) -> None:
        group = mesh.group("cp")
        self.size, self.rank, self.name = group.size(), group.rank(), group.group_name
        self.length = job.data.seq_len
        self.positions = self.positions_of(self.rank)
        order = torch.cat([self.positions_of(rank) for rank in range(self.size)])
        # On every device that needs them: a later copy would synchronize.
        self._order = {device: order.to(device) for device in {torch.device("cpu"), mesh.device}}
        self._local_positions = {device: self.positions.to(device) for device in self._order}

    @abstractmethod
    def positions_of(self, rank: int) -> Tensor:
        """The positions of a rank."""

    def local_positions(self, length: int, device: torch.device) -> Tensor:
        """This rank's positions."""
        assert length == len(self.positions), f"{length} tokens, but {len(self.positions)} are this rank's"
        return (
            self._local_positions[device] if device in self._local_positions else self.positions.to(device)
        )  # the meta device

    def local_columns(self, whole_BT: Tensor) -> Tensor:
        """The values of this rank's tokens, from one value per token of whole sequences."""
        return whole_BT[:, self._local_positions[whole_BT.device]]

    def restore_order(self, by_rank_BT: Tensor) -> Tensor:
        """Whole sequences in order, from the tokens of all ranks in rank order; (B, T, ...)."""
        whole_BT = torch.empty_like(by_rank_BT)
        whole_BT[:, self._order[by_rank_BT.device]] = by_rank_BT
        return whole_BT

    @torch.no_grad()
    def all_gather(self, local_tensor: Tensor, dim: int = 1) -> Tensor:
        """Every rank sends the values of its tokens and gets those of whole sequences."""
        by_rank = all_gather_rows(local_tensor.movedim(dim, 0), self.size, self.name)
        return self.restore_order(by_rank.unsqueeze(0))[0].movedim(0, dim)


def apply_context_parallel(decoder: Decoder, cp: ContextParallel | None) -> None:
    """Set the decoder's positions to those of this rank, and its attention to that of the ``cp`` group."""
    if cp is None:
        return
    decoder.context = cp
    for block in decoder.list_blocks():
        block.attention.context = cp


def gather_full_sequence(cp: ContextParallel, module: str, what: str, local_tensor: Tensor) -> Tensor:
    """The input or output that a module has for whole sequences. All ranks call it for the same module.

    Args:
        cp: The group.
        module: Its name.
        what: ``input`` or ``output``.
        local_tensor: The local input or output.
    """
    # Positions that are equal in all samples have no batch dim.
    unbatched = module == "positions" and local_tensor.ndim == (1 if what == "input" else 2)
    dim = 0 if unbatched else 1
    has_tokens = local_tensor.ndim > dim and local_tensor.shape[dim] == len(cp.positions)
    return cp.all_gather(local_tensor, dim) if has_tokens else local_tensor
