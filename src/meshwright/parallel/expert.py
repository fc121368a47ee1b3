"""Expert parallel: ranks of ``ep`` hold different experts, and tokens are sent to their experts and back.

A rank sorts its tokens by expert. An all-to-all exchanges the numbers of rows. A second all-to-all sends
the rows to the ranks of their experts (*dispatch*), a third one sends the outputs back in the same order
(*combine*). The counts differ from call to call; the CPU waits for them once.
A rank whose experts get no token takes part with no rows, and its gradients are zero.

With ``etp`` several ranks hold columns of the same experts. Each gets a copy of every row, and the sender
sums their outputs.

Where ranks of ``cp`` or ``tp`` share a sequence, each routes its own tokens (:class:`ShardedTokens`), and
counts per sequence are all-reduced.

Shape suffixes: B sequences, T tokens of one on this rank of ``cp``, N tokens of this rank, D hidden, E
experts, H experts of a rank, K experts of a token, X ranks of the group, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (the usual alias)
from torch import Tensor

from meshwright.layout.axes import EXPERT_AXIS, sequence_axis
from meshwright.measure.collective_counter import RoutedRows, count_routed_rows
from meshwright.models.decoder import Decoder
from meshwright.models.moe import (
    Experts,
    MixtureOfExperts,
    TokenPermutation,
    permute_tokens,
    stable_argsort,
    unpermute_tokens,
)
from meshwright.models.routing import Routing, Tokens, count_choices, queue_positions
from meshwright.parallel.collectives import all_gather_rows, all_to_all, all_to_all_rows
from meshwright.parallel.context import ContextParallel
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.parallel_context import ParallelContext
from meshwright.parallel.tensor_collectives import TensorParallel
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


class TokenDispatcher:
    """Sends tokens to the ranks of their experts, and the experts' outputs back."""

    def __init__(self, job: Job, mesh: Mesh) -> None:
        assert isinstance(job.model, DecoderModel), "only decoders have experts"
        self._experts, self._ep, self._etp = job.model.num_experts or 0, job.layout.ep, job.layout.etp
        self._group, self.rank = mesh.group(EXPERT_AXIS).group_name, mesh.group(EXPERT_AXIS).rank()

    def __call__(self, x_ND: Tensor, choice: Routing, experts: Experts) -> Tensor:
        """The weighted outputs of the chosen experts for this rank's tokens; (N, D)."""
        by_expert = TokenPermutation.of(choice, self._experts)
        incoming_XH = self.exchange_counts(
            by_expert.sizes_E.view(self._ep, -1).repeat_interleave(self._etp, 0)
        )
        dropped_1 = incoming_XH.new_zeros(1) if choice.kept_NK is None else (~choice.kept_NK).sum().view(1)
        numbers = torch.cat((dropped_1, by_expert.sizes_E, incoming_XH.flatten()))
        dropped, *counts = numbers.tolist()  # the CPU waits here
        outgoing, incoming = counts[: self._experts], _fold(counts[self._experts :], experts.num_local)
        blocks = [sum(rows) for rows in _fold(outgoing, experts.num_local)]
        sent = [rows for rows in blocks for _ in range(self._etp)]
        received = [sum(rows) for rows in incoming]
        dropped *= self._etp

        rows_RD = self._repeat(permute_tokens(x_ND, by_expert, sum(blocks)), blocks)
        rows_RD = _AllToAllRows.apply(rows_RD, sent, received, self._group, RoutedRows("input", dropped))
        order_R, inverse_R = _order_by_expert(incoming_XH, sum(received))
        out_RD = experts(
            _Reorder.apply(rows_RD, order_R, inverse_R), [sum(n) for n in zip(*incoming, strict=True)]
        )
        out_RD = _Reorder.apply(out_RD, inverse_R, order_R)
        out_RD = _AllToAllRows.apply(out_RD, received, sent, self._group, RoutedRows("output", dropped))
        return unpermute_tokens(self._sum_etp(out_RD, blocks), by_expert, choice.weights_NK)

    def exchange_counts(self, outgoing_XH: Tensor) -> Tensor:
        """Every rank sends each other rank the number of rows for its experts; (X, H)."""
        return all_to_all(outgoing_XH, self._group)

    def _repeat(self, rows_RD: Tensor, blocks: Sequence[int]) -> Tensor:
        """A copy of each block for every ``etp`` rank of its experts."""
        if self._etp == 1:
            return rows_RD
        return torch.cat([block for block in rows_RD.split(list(blocks)) for _ in range(self._etp)])

    def _sum_etp(self, out_RD: Tensor, blocks: Sequence[int]) -> Tensor:
        """The sum of the outputs of the ``etp`` ranks."""
        if self._etp == 1:
            return out_RD
        parts = out_RD.split([rows * self._etp for rows in blocks])
        return torch.cat([part.unflatten(0, (self._etp, -1)).sum(0) for part in parts])


def _fold(numbers: Sequence[int], width: int) -> list[Sequence[int]]:
    return [numbers[start : start + width] for start in range(0, len(numbers), width)]


def _order_by_expert(incoming_XH: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The permutation that sorts rows, received in rank order, by expert; and its inverse."""
    ranks, local = incoming_XH.shape
    experts = torch.arange(local, device=incoming_XH.device).repeat(ranks)
    expert_R = torch.repeat_interleave(experts, incoming_XH.flatten(), output_size=rows)
    return stable_argsort(expert_R)


class _AllToAllRows(torch.autograd.Function):
    """All-to-all of runs of rows of given lengths. Gradients go back the same way."""

    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, sent: list[int], received: list[int], group: str, counted: RoutedRows
    ) -> Tensor:
        back: Literal["input", "output"] = "input" if counted.side == "output" else "output"
        ctx.back, ctx.counted_back = (received, sent, group), replace(counted, side=back)
        with count_routed_rows(counted):
            return all_to_all_rows(rows_RD, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        with count_routed_rows(ctx.counted_back):
            return all_to_all_rows(grad_RD, *ctx.back), None, None, None, None


class _Reorder(torch.autograd.Function):
    """Permutes rows. Gradients are permuted back."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return rows_RD[order_R]

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        (inverse_R,) = ctx.saved_tensors
        return grad_RD[inverse_R], None, None


class ShardedTokens(Tokens):
    """Sequences whose tokens are sharded: over ``cp`` by position, over ``tp`` in equal runs."""

    def __init__(self, job: Job, mesh: Mesh, tp: TensorParallel | None, cp: ContextParallel | None) -> None:
        self._tp, self._cp = tp, cp
        self._tp_size, self._cp_size = job.layout.tp, job.layout.cp
        self._group = mesh.group(sequence_axis(job.layout).name)

    def select_local(self, x: Tensor) -> Tensor:
        """The tokens that this rank routes, (N, D)."""
        if self._tp is None or self._tp.sequence_parallel:
            return x.flatten(0, -2)
        x_ND = x.flatten(0, -2)
        if missing := -len(x_ND) % self._tp_size:  # generation, one token at a time
            x_ND = F.pad(x_ND, (0, 0, 0, missing))
        return _ScatterTokens.apply(x_ND, self._tp_size, self._tp.name, self._tp.rank)

    def restore_shape(self, out_ND: Tensor, like: Tensor) -> Tensor:
        """The outputs of the local tokens, in the shape of the hidden states."""
        if self._tp is None or self._tp.sequence_parallel:
            return out_ND.view_as(like)
        whole_ND = _GatherTokens.apply(out_ND, self._tp_size, self._tp.name, self._tp.rank)
        return whole_ND[: like.shape[:-1].numel()].view_as(like)

    def length(self, num_local: int, batch: int) -> int:
        """Tokens of one whole sequence."""
        return num_local * self._tp_size * self._cp_size // batch

    def sequence_of(self, num_local: int, batch: int, device: torch.device) -> Tensor:
        """The sequence index of each local token, (N,)."""
        return self._index(num_local, device) // (num_local * self._tp_size // batch)

    def position_of(self, num_local: int, batch: int, device: torch.device) -> Tensor:
        """The position of each local token in its sequence, (N,)."""
        length = num_local * self._tp_size // batch
        index = self._index(num_local, device) % length
        return index if self._cp is None else self._cp.local_positions(length, device)[index]

    def _index(self, num_local: int, device: torch.device) -> Tensor:
        """The index of each local token among the tokens of all ``tp`` ranks."""
        first = 0 if self._tp is None else self._tp.rank * num_local
        return torch.arange(first, first + num_local, device=device)

    def all_reduce_counts(self, counts_BE: Tensor) -> Tensor:
        """Counts over whole sequences: every rank sends its counts and gets the sum."""
        summed = counts_BE.clone()
        # Not functional: selective activation checkpointing would take it for a row-parallel linear's output.
        dist.all_reduce(summed, group=self._group)
        return summed

    def expert_queue_positions(
        self, experts_NK: Tensor, tokens_B: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor]:
        """Queue positions over whole sequences: every rank sends its tokens' experts and gets all of them."""
        batch, device = len(tokens_B), experts_NK.device
        whole_BTK = self._gather_whole(experts_NK, batch)
        tokens = whole_BTK.shape[1]
        sequence = torch.arange(batch, device=device).repeat_interleave(tokens)
        real = (torch.arange(tokens, device=device) < tokens_B.unsqueeze(1)).flatten()
        experts_of_all = whole_BTK.flatten(0, 1)
        queue_BTK = queue_positions(sequence, experts_of_all, num_experts).view_as(whole_BTK)
        if self._cp is not None:
            queue_BTK = self._cp.local_columns(queue_BTK)
        own = queue_BTK.flatten(0, 1)
        if self._tp is not None:
            own = own.chunk(self._tp_size)[self._tp.rank]
        return own, count_choices(sequence, experts_of_all, real, batch, num_experts)

    def gather(self, experts_NK: Tensor) -> Tensor:
        """Every rank sends the experts of its tokens and gets those of all ranks, in rank order."""
        return all_gather_rows(experts_NK, self._tp_size * self._cp_size, self._group.group_name)

    def _gather_whole(self, experts_NK: Tensor, batch: int) -> Tensor:
        """The experts of every token of whole sequences, in sequence order."""
        by_rank = self.gather(experts_NK).view(self._cp_size, batch, -1, experts_NK.shape[1])
        if self._cp is None:
            return by_rank[0]
        return self._cp.restore_order(by_rank.transpose(0, 1).flatten(1, 2))


class _ScatterTokens(torch.autograd.Function):
    """Forward: this rank's run of tokens that all ranks have. Backward: all-gather."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, size: int, group: str, rank: int) -> Tensor:
        ctx.group = (size, group)
        return x_ND.chunk(size)[rank].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return all_gather_rows(grad, *ctx.group), None, None, None


class _GatherTokens(torch.autograd.Function):
    """Forward: all-gather of the runs. Backward: this rank's run, as every rank has the full gradient."""

    @staticmethod
    def forward(ctx: Any, out_ND: Tensor, size: int, group: str, rank: int) -> Tensor:
        ctx.group = (size, rank)
        return all_gather_rows(out_ND, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        size, rank = ctx.group
        return grad.chunk(size)[rank], None, None, None


def apply_expert_parallel(decoder: Decoder, job: Job, parallel: ParallelContext) -> None:
    """Connect the MoE layers of a decoder to the ranks that share their experts and sequences."""
    layers = [module for module in decoder.modules() if isinstance(module, MixtureOfExperts)]
    if not layers:
        return
    mesh, tp, cp = parallel.mesh, parallel.tp, parallel.cp
    tokens = ShardedTokens(job, mesh, tp, cp) if tp is not None or cp is not None else None
    dispatcher = TokenDispatcher(job, mesh) if EXPERT_AXIS in mesh.groups else None
    for layer in layers:
        layer.tokens = tokens or layer.tokens
        layer.dispatch = dispatcher or layer.dispatch
        layer.experts.down.bias_ranks = job.layout.etp
