"""Context parallelism: ranks of ``cp`` share each sequence, and only attention makes them speak.

``ring``     keys and values go round (``run.parallel.ring``). Positions lie in a zig-zag.
``ulysses``  before attention every rank trades its run of positions of all heads for all positions of some
             heads, and back behind it: each rank sends and receives one part of its tensor to and from each
             other. Positions lie in order. Key heads fewer than ranks are repeated.

All other modules see a rank's own tokens and need not know of it. Gradients are then parts of a sum, which
the axes of data add up: ``cp`` is one of them (``plan.axes``).

Shape suffixes: B batch, T tokens of a sequence on this rank, L tokens of whole sequences, H query heads,
K key heads, E head size, R ranks, P heads of queries, keys and values on one rank.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from meshwright.models.attention import Context, causal_attention
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.ring_attention import causal_ring_attention, connect_ring, zigzag_positions
from meshwright.parallel.tensor_collectives import all_gather_rows
from meshwright.spec.job import Job

_functional = torch.ops._c10d_functional


class ContextParallel(Context):
    """A rank's place among those that share each sequence."""

    def __init__(self, job: Job, mesh: Mesh) -> None:
        group = mesh.group("cp")
        self.size, self.rank, self.name = group.size(), group.rank(), group.group_name
        self.length = job.data.seq_len
        self.positions = self.positions_of(self.rank)
        order = torch.cat([self.positions_of(rank) for rank in range(self.size)])
        # Where they are needed, so that no later copy makes the host wait.
        self._order = {device: order.to(device) for device in {torch.device("cpu"), mesh.device}}
        self._own = {device: self.positions.to(device) for device in self._order}

    @abstractmethod
    def positions_of(self, rank: int) -> Tensor:
        """The positions of a rank."""

    def local_positions(self, length: int, device: torch.device) -> Tensor:
        """Its positions."""
        assert length == len(self.positions), f"{length} tokens, and {len(self.positions)} are this rank's"
        return self._own[device] if device in self._own else self.positions.to(device)  # else it lies nowhere

    def local_columns(self, whole_BT: Tensor) -> Tensor:
        """Of one number a token of whole sequences, those of the own tokens."""
        return whole_BT[:, self._own[whole_BT.device]]

    def restore_order(self, by_rank_BT: Tensor) -> Tensor:
        """Tokens of whole sequences in order, of those of all ranks one after the other; (B, T, ...)."""
        whole_BT = torch.empty_like(by_rank_BT)
        whole_BT[:, self._order[by_rank_BT.device]] = by_rank_BT
        return whole_BT

    @torch.no_grad()
    def all_gather(self, own: Tensor, dim: int = 1) -> Tensor:
        """Whole sequences of what each rank has for its own tokens: every rank sends its own and gets all."""
        by_rank = all_gather_rows(own.movedim(dim, 0), self.size, self.name)
        return self.restore_order(by_rank.unsqueeze(0))[0].movedim(0, dim)


class RingContextParallel(ContextParallel):
    """Keys and values go round."""

    def __init__(self, job: Job, mesh: Mesh) -> None:
        super().__init__(job, mesh)
        connect_ring(self.name, mesh.device)

    def positions_of(self, rank: int) -> Tensor:
        """Two runs, one of them as far from the end as the other from the beginning."""
        return zigzag_positions(self.length, rank, self.size)

    def build_mask(self, segments_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """The documents themselves: each round hides what it must."""
        return segments_BT

    def attend(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, hidden: Tensor | None) -> Tensor:
        """Attention of the own queries to the keys of all ranks."""
        return causal_ring_attention(q_BHTE, k_BKTE, v_BKTE, hidden, self.name)


class UlyssesContextParallel(ContextParallel):
    """Positions are traded for heads."""

    def positions_of(self, rank: int) -> Tensor:
        """One run."""
        return torch.arange(self.length).chunk(self.size)[rank]

    def attend(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, hidden: Tensor | None) -> Tensor:
        """Attention of some heads, along the whole sequence."""
        q_BHLE, k_BKLE, v_BKLE = self._all_to_all_heads(q_BHTE, k_BKTE, v_BKTE)
        mixed_BHLE = causal_attention(q_BHLE, k_BKLE, v_BKLE, hidden)
        parts_RBHTE = mixed_BHLE.unflatten(2, (self.size, -1)).movedim(2, 0)
        return _AllToAll.apply(parts_RBHTE, self.name).movedim(0, 1).flatten(1, 2)

    def _all_to_all_heads(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of some heads at all positions."""
        repeats = max(1, self.size // k_BKTE.shape[1])
        if repeats > 1:
            k_BKTE, v_BKTE = (part.repeat_interleave(repeats, dim=1) for part in (k_BKTE, v_BKTE))
        parts = [part.unflatten(1, (self.size, -1)).movedim(1, 0) for part in (q_BHTE, k_BKTE, v_BKTE)]
        traded_RBPTE = _AllToAll.apply(torch.cat(parts, dim=2), self.name)
        return traded_RBPTE.movedim(0, 2).flatten(2, 3).split([part.shape[2] for part in parts], dim=1)


class _AllToAll(torch.autograd.Function):
    """Rank r sends its s-th part to rank s and gets that one's r-th part; the gradient goes the same way."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: str) -> Tensor:
        ctx.group = group
        return all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_to_all(grad, ctx.group), None


def all_to_all(parts: Tensor, group: str) -> Tensor:
    """Every rank sends a part, of as many as there are ranks, to each other, and gets one from each."""
    even = [1] * len(parts)
    return _functional.wait_tensor(_functional.all_to_all_single(parts.contiguous(), even, even, group))


CONTEXTS = {"ring": RingContextParallel, "ulysses": UlyssesContextParallel}


def build_context_parallel(job: Job, mesh: Mesh) -> ContextParallel | None:
    """The rank's place among those that share its sequences; None if nobody does."""
    return CONTEXTS[job.layout.context](job, mesh) if job.layout.cp > 1 else None


def gather_full_sequence(context: ContextParallel, module: str, what: str, own: Tensor) -> Tensor:
    """What a module would have read or put out of whole sequences; all ranks ask for the same together.

    Args:
        context: The rank's place.
        module: Its name.
        what: ``input`` or ``output``.
        own: What it really put out, or was called with.
    """
    # Positions that every sample counts from zero are looked up once for all of them.
    shared = module == "positions" and own.ndim == (1 if what == "input" else 2)
    dim = 0 if shared else 1
    tokens = own.ndim > dim and own.shape[dim] == len(context.positions)
    return context.all_gather(own, dim) if tokens else own
