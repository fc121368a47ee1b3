"""Expert parallelism: ranks of ``ep`` hold different experts, and tokens travel to theirs and back.

Every rank sorts its tokens by expert and tells the others how many are coming. Then each sends every other
the rows for that one's experts (*dispatch*), and gets the answers back in the same order (*combine*). Counts
differ from call to call; they are the one thing that the host waits for. A rank whose experts nobody chose
takes part with nothing, and gradients of zeros.

With ``etp`` several ranks hold columns of the same experts: each gets a copy of every row, and the sender
adds up what they answer.

Where ranks of ``cp`` or ``tp`` share a sequence, each routes its own tokens (:class:`ShardedTokens`); they
add up what is counted over the whole of it.

Shape suffixes: B sequences, T tokens of one on this rank of ``cp``, N tokens of this rank, D hidden, E
experts, H experts held by a rank, K experts of a token, X ranks of the group, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor

from meshwright.layout.axes import EXPERT_AXIS, sequence_axis
from meshwright.measure.collective_counter import declare_bytes
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
from meshwright.parallel.context import ContextParallel, all_to_all
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.tensor_collectives import TensorParallel, all_gather_rows
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

_functional = torch.ops._c10d_functional


class TokenDispatcher:
    """A rank's place among those that hold different experts; brings tokens there and back."""

    def __init__(self, job: Job, mesh: Mesh) -> None:
        assert isinstance(job.model, DecoderModel), "only decoders have experts"
        self._experts, self._ep, self._etp = job.model.num_experts or 0, job.layout.ep, job.layout.etp
        self._group, self.place = mesh.group(EXPERT_AXIS).group_name, mesh.group(EXPERT_AXIS).rank()

    def __call__(self, x_ND: Tensor, choice: Routing, experts: Experts) -> Tensor:
        """What the experts of a choice, wherever they are, make of this rank's tokens; (N, D)."""
        by_expert = TokenPermutation.of(choice, self._experts)
        arriving_XH = self.exchange_counts(
            by_expert.sizes_E.view(self._ep, -1).repeat_interleave(self._etp, 0)
        )
        told = torch.cat((by_expert.sizes_E, arriving_XH.flatten())).tolist()  # what the host waits for
        leaving, arriving = told[: self._experts], _fold(told[self._experts :], experts.held)
        blocks = [sum(rows) for rows in _fold(leaving, experts.held)]
        sent = [rows for rows in blocks for _ in range(self._etp)]
        received = [sum(rows) for rows in arriving]
        counted = self._etp * choice.experts_NK.numel() * x_ND.shape[1] * x_ND.element_size()
        way = (self._group, counted)

        rows_RD = self._copy(permute_tokens(x_ND, by_expert, sum(blocks)), blocks)
        rows_RD = _AllToAllRows.apply(rows_RD, sent, received, *way)
        order_R, place_R = _order_by_expert(arriving_XH, sum(received))
        answers_RD = experts(
            _Reorder.apply(rows_RD, order_R, place_R), [sum(n) for n in zip(*arriving, strict=True)]
        )
        answers_RD = _Reorder.apply(answers_RD, place_R, order_R)
        answers_RD = _AllToAllRows.apply(answers_RD, received, sent, *way)
        return unpermute_tokens(self._add_copies(answers_RD, blocks), by_expert, choice.weights_NK)

    def exchange_counts(self, told_XH: Tensor) -> Tensor:
        """Every rank tells each other how many rows are coming for that one's experts; (X, H)."""
        return all_to_all(told_XH, self._group)

    def _copy(self, rows_RD: Tensor, blocks: Sequence[int]) -> Tensor:
        """A copy of each block for every rank that has a part of its experts."""
        if self._etp == 1:
            return rows_RD
        return torch.cat([block for block in rows_RD.split(list(blocks)) for _ in range(self._etp)])

    def _add_copies(self, answers_RD: Tensor, blocks: Sequence[int]) -> Tensor:
        """The sum of what those ranks answered."""
        if self._etp == 1:
            return answers_RD
        parts = answers_RD.split([rows * self._etp for rows in blocks])
        return torch.cat([part.unflatten(0, (self._etp, -1)).sum(0) for part in parts])


def _fold(numbers: Sequence[int], width: int) -> list[Sequence[int]]:
    return [numbers[start : start + width] for start in range(0, len(numbers), width)]


def _order_by_expert(arriving_XH: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Where the rows of each expert lie among those that arrive rank by rank, and the other way round."""
    ranks, held = arriving_XH.shape
    experts = torch.arange(held, device=arriving_XH.device).repeat(ranks)
    expert_R = torch.repeat_interleave(experts, arriving_XH.flatten(), output_size=rows)
    return stable_argsort(expert_R)


class _AllToAllRows(torch.autograd.Function):
    """Rows to the ranks of a group, in runs of given lengths; gradients go the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, sent: list[int], received: list[int], group: str, counted: int
    ) -> Tensor:
        ctx.way = (received, sent, group, counted)
        return _all_to_all_rows(rows_RD, sent, received, group, counted)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all_rows(grad_RD, *ctx.way), None, None, None, None


def _all_to_all_rows(
    rows_RD: Tensor, sent: list[int], received: list[int], group: str, counted: int
) -> Tensor:
    """Every rank sends a run of rows to each other; counts as what leaves if nothing is dropped."""
    with declare_bytes(counted):
        arrived = _functional.all_to_all_single(rows_RD.contiguous(), received, sent, group)
    return _functional.wait_tensor(arrived)


class _Reorder(torch.autograd.Function):
    """Rows in another order; gradients in the old one."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, order_R: Tensor, back_R: Tensor) -> Tensor:
        ctx.save_for_backward(back_R)
        return rows_RD[order_R]

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        (back_R,) = ctx.saved_tensors
        return grad_RD[back_R], None, None


class ShardedTokens(Tokens):
    """Sequences of which other ranks have tokens, too: of ``cp`` other positions, of ``tp`` other runs."""

    def __init__(
        self, job: Job, mesh: Mesh, tp: TensorParallel | None, context: ContextParallel | None
    ) -> None:
        self._tp, self._context = tp, context
        self._tp_size, self._cp_size = job.layout.tp, job.layout.cp
        self._group = mesh.group(sequence_axis(job.layout).name)

    def own(self, x: Tensor) -> Tensor:
        """The rank's own tokens of the stream, (N, D)."""
        if self._tp is None or self._tp.sequence:
            return x.flatten(0, -2)
        x_ND = x.flatten(0, -2)
        if missing := -len(x_ND) % self._tp_size:  # where text is written, one token at a time
            x_ND = F.pad(x_ND, (0, 0, 0, missing))
        return _ScatterTokens.apply(x_ND, self._tp_size, self._tp.name, self._tp.rank)

    def back(self, out_ND: Tensor, like: Tensor) -> Tensor:
        """What became of the own tokens, in the shape of the stream."""
        if self._tp is None or self._tp.sequence:
            return out_ND.view_as(like)
        whole_ND = _GatherTokens.apply(out_ND, self._tp_size, self._tp.name, self._tp.rank)
        return whole_ND[: like.shape[:-1].numel()].view_as(like)

    def length(self, own: int, batch: int) -> int:
        """Tokens of one whole sequence."""
        return own * self._tp_size * self._cp_size // batch

    def sequence_of(self, own: int, batch: int, device: torch.device) -> Tensor:
        """The sequence that each own token is part of, (N,)."""
        return self._index(own, device) // (own * self._tp_size // batch)

    def position_of(self, own: int, batch: int, device: torch.device) -> Tensor:
        """The position of each own token in its sequence, (N,)."""
        length = own * self._tp_size // batch
        index = self._index(own, device) % length
        return index if self._context is None else self._context.local_positions(length, device)[index]

    def _index(self, own: int, device: torch.device) -> Tensor:
        """Where each own token lies among all that the ranks of ``tp`` have together."""
        first = 0 if self._tp is None else self._tp.rank * own
        return torch.arange(first, first + own, device=device)

    def all_reduce_counts(self, counts_BE: Tensor) -> Tensor:
        """Counts over whole sequences: every rank sends its own and gets the sum."""
        summed = counts_BE.clone()
        # Not a functional collective: selective recomputation would take it for the sum of a split product.
        dist.all_reduce(summed, group=self._group)
        return summed

    def expert_queue_positions(
        self, experts_NK: Tensor, batch: int, num_experts: int
    ) -> tuple[Tensor, Tensor]:
        """As if all tokens were here: every rank sends its tokens' experts and gets all of them."""
        whole_BTK = self._gather_whole(experts_NK, batch)
        tokens, device = whole_BTK.shape[1], experts_NK.device
        sequence = torch.arange(batch, device=device).repeat_interleave(tokens)
        everywhere = whole_BTK.flatten(0, 1)
        places_BTK = queue_positions(sequence, everywhere, num_experts).view_as(whole_BTK)
        if self._context is not None:
            places_BTK = self._context.local_columns(places_BTK)
        own = places_BTK.flatten(0, 1)
        if self._tp is not None:
            own = own.chunk(self._tp_size)[self._tp.rank]
        return own, count_choices(sequence, everywhere, batch, num_experts)

    def gather(self, experts_NK: Tensor) -> Tensor:
        """The experts of all ranks' tokens, rank by rank."""
        return all_gather_rows(experts_NK, self._tp_size * self._cp_size, self._group.group_name)

    def _gather_whole(self, experts_NK: Tensor, batch: int) -> Tensor:
        """The experts of every token of whole sequences, in their order."""
        by_rank = self.gather(experts_NK).view(self._cp_size, batch, -1, experts_NK.shape[1])
        if self._context is None:
            return by_rank[0]
        return self._context.restore_order(by_rank.transpose(0, 1).flatten(1, 2))


class _ScatterTokens(torch.autograd.Function):
    """Forward: the rank's run of tokens that all have. Backward: the runs of all ranks."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, size: int, group: str, rank: int) -> Tensor:
        ctx.place = (size, group)
        return x_ND.chunk(size)[rank].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return all_gather_rows(grad, *ctx.place), None, None, None


class _GatherTokens(torch.autograd.Function):
    """Forward: the runs of all ranks. Backward: the rank's own, as every rank has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, out_ND: Tensor, size: int, group: str, rank: int) -> Tensor:
        ctx.place = (size, rank)
        return all_gather_rows(out_ND, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        size, rank = ctx.place
        return grad.chunk(size)[rank], None, None, None


def apply_expert_parallel(
    network: Decoder, job: Job, mesh: Mesh, tp: TensorParallel | None, context: ContextParallel | None
) -> None:
    """Let the layers with experts of a model know which ranks share their experts and their sequences."""
    layers = [module for module in network.modules() if isinstance(module, MixtureOfExperts)]
    if not layers:
        return
    tokens = ShardedTokens(job, mesh, tp, context) if tp is not None or context is not None else None
    exchange = TokenDispatcher(job, mesh) if EXPERT_AXIS in mesh.groups else None
    for layer in layers:
        layer.tokens = tokens or layer.tokens
        layer.dispatch = exchange or layer.dispatch
        layer.experts.down.bias_ranks = job.layout.etp
