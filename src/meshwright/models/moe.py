"""Mixture of experts (MoE): a router sends each token to its top-k experts and sums their weighted outputs.

Tokens are permuted into expert order, pass through all experts in one grouped GEMM per weight, and are
unpermuted. Nothing is padded, and nothing is dropped unless the model has a capacity factor. The CPU waits
for one thing per layer: the number of tokens of each expert.

:attr:`MixtureOfExperts.dispatch` brings tokens to their experts; here all experts are in this process.

Shape suffixes: B sequences, T tokens of a sequence, N tokens of this rank, D hidden, F inner width, E
experts, K experts per token, R rows that experts read (at most N x K).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the usual alias)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.models.feed_forward import build_feed_forward, gelu_form
from meshwright.models.kernels.grouped_gemm import grouped_gemm
from meshwright.models.norms import compute_dtype
from meshwright.models.routing import Router, Routing, Tokens
from meshwright.spec.model import DecoderModel


class ExpertLinear(nn.Module):
    """One linear layer of every local expert, their weights concatenated."""

    bias_ranks = 1
    """Ranks that hold the same bias and whose outputs are summed."""

    def __init__(self, experts: int, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts * out_features, in_features))
        self.bias = nn.Parameter(torch.empty(experts * out_features)) if bias else None

    def forward(self, x_RI: Tensor, sizes: list[int]) -> Tensor:
        """Each expert's rows times its weight."""
        dtype = compute_dtype(x_RI)
        bias = None if self.bias is None else _BiasShare.apply(self.bias, self.bias_ranks).to(dtype)
        return grouped_gemm(x_RI.to(dtype), self.weight.to(dtype), bias, sizes)


class Experts(nn.Module):
    """The local routed experts of a layer; each is the model's kind of feed-forward."""

    gate: ExpertLinear
    rows_read: int | None = None
    """Rows of the latest forward pass; the step audit resets it to None."""

    def __init__(self, model: DecoderModel) -> None:
        super().__init__()
        experts, width, inner = model.local_experts, model.hidden_size, model.local_expert_width
        self.num_local = experts
        self.gated, self.approximate = model.activation == "swiglu", gelu_form(model)
        if self.gated:
            self.gate = ExpertLinear(experts, width, inner, model.ffn_bias)
        self.up = ExpertLinear(experts, width, inner, model.ffn_bias)
        self.down = ExpertLinear(experts, inner, width, model.ffn_bias)

    def forward(self, x_RD: Tensor, sizes: list[int]) -> Tensor:
        """The output of each row's expert.

        Args:
            x_RD: Rows, sorted by expert.
            sizes: Rows of each local expert.
        """
        self.rows_read = len(x_RD)
        if self.gated:
            inner_RF = F.silu(self.gate(x_RD, sizes)) * self.up(x_RD, sizes)
        else:
            inner_RF = F.gelu(self.up(x_RD, sizes), approximate=self.approximate)
        return self.down(inner_RF, sizes)


Dispatch = Callable[[Tensor, Routing, Experts], Tensor]
"""Sends tokens (N, D) to their experts and returns the weighted sums of the outputs, (N, D)."""


@dataclass(frozen=True)
class TokenPermutation:
    """The permutation of (token, slot) pairs into expert order; dropped ones come last."""

    order_S: Tensor
    """For each row in expert order, its pair as token x K + slot; S = N x K."""
    inverse_S: Tensor
    """The inverse: for each pair, its row in expert order."""
    sizes_E: Tensor
    """Rows of each expert, int64."""
    per_token: int
    """Experts per token: K."""

    @classmethod
    def of(cls, routing: Routing, num_experts: int) -> TokenPermutation:
        """Sort stably: rows of one expert stay in token order."""
        expert_S = routing.experts_NK
        if routing.kept_NK is not None:
            expert_S = torch.where(routing.kept_NK, expert_S, num_experts)
        expert_S = expert_S.flatten()
        order_S, inverse_S = stable_argsort(expert_S)
        sizes = torch.zeros(num_experts + 1, dtype=torch.int64, device=expert_S.device)
        sizes.scatter_add_(0, expert_S, torch.ones_like(expert_S))
        return cls(order_S, inverse_S, sizes[:num_experts], routing.experts_NK.shape[1])


def stable_argsort(numbers_S: Tensor) -> tuple[Tensor, Tensor]:
    """The permutation that sorts the numbers, and its inverse."""
    order_S = numbers_S.argsort(stable=True)
    index_S = torch.arange(len(order_S), dtype=torch.int64, device=order_S.device)
    return order_S, torch.empty_like(order_S).scatter_(0, order_S, index_S)


def permute_tokens(x_ND: Tensor, by_expert: TokenPermutation, rows: int) -> Tensor:
    """The first ``rows`` rows in expert order, each token once per expert, (R, D)."""
    return _Permute.apply(x_ND, by_expert.order_S[:rows], by_expert.inverse_S, by_expert.per_token)


def unpermute_tokens(y_RD: Tensor, by_expert: TokenPermutation, weights_NK: Tensor) -> Tensor:
    """Experts' outputs back in token order, weighted and summed, (N, D)."""
    y_SD = _Unpermute.apply(y_RD, by_expert.order_S, by_expert.inverse_S)
    y_NKD = y_SD.view(*weights_NK.shape, -1)
    return torch.bmm(weights_NK.to(y_NKD.dtype).unsqueeze(1), y_NKD).squeeze(1)


def dispatch_local(x_ND: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """Dispatch if this process holds all experts: permute, compute, unpermute; nothing is sent."""
    by_expert = TokenPermutation.of(routing, experts.num_local)
    sizes = by_expert.sizes_E.tolist()  # the only device sync
    y_RD = experts(permute_tokens(x_ND, by_expert, sum(sizes)), sizes)
    return unpermute_tokens(y_RD, by_expert, routing.weights_NK)


class MixtureOfExperts(nn.Module):
    """The feed-forward of an MoE block."""

    def __init__(self, model: DecoderModel) -> None:
        super().__init__()
        self.router = Router(model)
        self.experts = Experts(model)
        self.shared = build_feed_forward(model, model.shared_width) if model.shared_width else None
        self.tokens = Tokens()
        self.dispatch: Dispatch = dispatch_local

    def forward(self, x: Tensor, weights_B2: Tensor | None = None) -> Tensor:
        """The outputs of each token's routed and shared experts.

        Args:
            x: Hidden states.
            weights_B2: Each sequence's share of the batch; see :class:`Router`.
        """
        x_ND = self.tokens.select_local(x)
        routing = self.router(x_ND, weights_B2, self.tokens)
        out = self.tokens.restore_shape(self.dispatch(x_ND, routing, self.experts), x)
        return out if self.shared is None else out + self.shared(x)


class _BiasShare(torch.autograd.Function):
    """A rank's share of a bias that several ranks add; the gradient is not divided."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: int) -> Tensor:
        return whole / ranks

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Permute(torch.autograd.Function):
    """Copies each token to the rows of its experts; the backward pass sums them in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_R: Tensor, inverse_S: Tensor, per_token: int) -> Tensor:
        ctx.save_for_backward(inverse_S)
        ctx.per_token = per_token
        return x_ND[order_R // per_token]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        (inverse_S,) = ctx.saved_tensors
        grad_SD = _fill(grad_RD, len(inverse_S))[inverse_S]
        return grad_SD.view(-1, ctx.per_token, grad_RD.shape[1]).sum(1), None, None, None


class _Unpermute(torch.autograd.Function):
    """Rows back to (token, slot) order; dropped ones are zero."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, order_S: Tensor, inverse_S: Tensor) -> Tensor:
        ctx.save_for_backward(order_S)
        ctx.rows = len(y_RD)
        return _fill(y_RD, len(inverse_S))[inverse_S]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor | None, ...]:
        (order_S,) = ctx.saved_tensors
        return grad_SD[order_S[: ctx.rows]], None, None


def _fill(rows_RD: Tensor, rows: int) -> Tensor:
    """Pad with rows of zeros."""
    return rows_RD if len(rows_RD) == rows else F.pad(rows_RD, (0, 0, 0, rows - len(rows_RD)))
