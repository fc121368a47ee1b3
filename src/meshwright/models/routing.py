"""The MoE router: top-k experts and weights of each token, capacity, load-balancing loss and z-loss.

Routing is a function of a token and its sequence, never of the micro-batch or the rank: capacity and the
balance loss are counted per sequence. :class:`Tokens` describes the sequences of a rank's tokens.

The balance loss and the z-loss have no autograd graph. Their gradients have a closed form and are added to
the gradient of the router's logits in the backward pass. So the reported loss is cross-entropy only, and
pipeline stages without a loss need nothing special.

Shape suffixes: B sequences, N tokens of this rank, D hidden, E experts, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the usual alias)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.spec.model import DecoderModel

Choose = Callable[[Tensor, Tensor], Tensor]
"""From scores (N, E) and their top-k experts (N, K): the experts to use instead."""


@dataclass(frozen=True)
class Routing:
    """The experts of each token."""

    experts_NK: Tensor
    """Expert indices, int64."""
    weights_NK: Tensor
    """Weights of the experts' outputs, float32; they sum to one per token and have a gradient."""
    kept_NK: Tensor | None = None
    """False if the expert was over capacity; None if nothing is dropped."""


class Tokens:
    """The sequences of a rank's tokens; here each rank has whole sequences."""

    def select_local(self, x: Tensor) -> Tensor:
        """The tokens that this rank routes, (N, D)."""
        return x.flatten(0, -2)

    def restore_shape(self, out_ND: Tensor, like: Tensor) -> Tensor:
        """The outputs of the local tokens, in the shape of the hidden states."""
        return out_ND.view_as(like)

    def length(self, num_local: int, batch: int) -> int:
        """Tokens of one whole sequence, if this rank has ``num_local`` tokens of ``batch`` sequences."""
        return num_local // batch

    def sequence_of(self, num_local: int, batch: int, device: torch.device) -> Tensor:
        """The sequence index of each local token, (N,)."""
        return torch.arange(num_local, dtype=torch.int64, device=device) // (num_local // batch)

    def position_of(self, num_local: int, batch: int, device: torch.device) -> Tensor:
        """The position of each local token in its sequence, (N,)."""
        return torch.arange(num_local, dtype=torch.int64, device=device) % (num_local // batch)

    def all_reduce_counts(self, counts_BE: Tensor) -> Tensor:
        """Counts over whole sequences from counts over local tokens, float32."""
        return counts_BE

    def expert_queue_positions(
        self, experts_NK: Tensor, tokens_B: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor]:
        """The queue position of each (token, slot) pair at its expert, and the counts without padding.

        Args:
            experts_NK: Experts of the local tokens.
            tokens_B: Tokens of each sequence without padding.
            num_experts: Number of experts of the layer.

        Returns:
            For each pair the number of earlier pairs of its sequence (by token, then slot) at the same
            expert, (N, K); and the counts over whole sequences, (B, E), float32.
        """
        num_local, batch, device = len(experts_NK), len(tokens_B), experts_NK.device
        sequence_N = self.sequence_of(num_local, batch, device)
        real_N = self.position_of(num_local, batch, device) < tokens_B[sequence_N]
        places_NK = queue_positions(sequence_N, experts_NK, num_experts)
        return places_NK, count_choices(sequence_N, experts_NK, real_N, batch, num_experts)


def queue_positions(sequence_N: Tensor, experts_NK: Tensor, num_experts: int) -> Tensor:
    """For each (token, slot) pair, the number of earlier pairs of its sequence at the same expert."""
    queue = (sequence_N.unsqueeze(1) * num_experts + experts_NK).flatten()
    in_order, order = queue.sort(stable=True)
    index = torch.arange(len(queue), dtype=torch.int64, device=queue.device)
    begins = torch.ones_like(in_order, dtype=torch.bool)
    begins[1:] = in_order[1:] != in_order[:-1]
    places = index - torch.where(begins, index, 0).cummax(0).values
    return torch.empty_like(places).scatter_(0, order, places).view_as(experts_NK)


def count_choices(
    sequence_N: Tensor, experts_NK: Tensor, real_N: Tensor, batch: int, num_experts: int
) -> Tensor:
    """Tokens of each sequence at each expert, without padding (``real_N`` is false), (B, E), float32."""
    queue = (sequence_N.unsqueeze(1) * num_experts + experts_NK).flatten()
    counts = torch.zeros(batch * num_experts, dtype=torch.int64, device=queue.device)
    counted = real_N.unsqueeze(1).expand_as(experts_NK).flatten().to(counts.dtype)
    return counts.scatter_add_(0, queue, counted).view(batch, num_experts).float()


@dataclass(frozen=True)
class AuxiliaryLosses:
    """Coefficients of the load-balancing loss and the z-loss."""

    balance: float = 0.0
    """Coefficient of the balance loss."""
    z: float = 0.0
    """Coefficient of the z-loss."""
    scale: Callable[[], Tensor | None] = lambda: None
    """fp16's loss scale, on the device; None without one."""


class Router(nn.Module):
    """Scores every expert for every token and takes the top k; always in float32."""

    def __init__(self, model: DecoderModel) -> None:
        super().__init__()
        assert model.num_experts is not None, "a router has experts to choose from"
        assert model.experts_per_token is not None, "the legality table asks for experts_per_token"
        self.num_experts, self.per_token = model.num_experts, model.experts_per_token
        self.kind, self.capacity_factor = model.router, model.capacity_factor
        self.weight = nn.Parameter(torch.empty(model.num_experts, model.hidden_size))
        self.auxiliary = AuxiliaryLosses()
        self.choose: Choose | None = None
        """Overrides the top-k choice; ``verify`` replays the choices of another run."""
        self.selection_bias: Tensor | None = None
        """(E,), added to the scores for the top-k choice only, not for the weights."""
        self.load: Tensor | None = None
        """The step's sums: tokens per expert, dropped tokens, both losses; float64, (E + 3,)."""
        self.is_counting = False
        """Whether tokens are counted: in the forward pass, not in recomputation."""

    def forward(self, x_ND: Tensor, weights_B2: Tensor | None, tokens: Tokens) -> Routing:
        """Route this rank's tokens.

        Args:
            x_ND: The tokens.
            weights_B2: Each sequence's share of the batch, and its number of tokens without padding; None in
                generation, which has no capacity.
            tokens: Tokens of the sequences.
        """
        learning = weights_B2 is not None and torch.is_grad_enabled()
        with torch.autocast(x_ND.device.type, enabled=False):
            logits_NE = F.linear(x_ND.float(), self.weight.float())
            with torch.no_grad():
                scores_NE = logits_NE.softmax(-1) if self.kind == "softmax" else logits_NE.sigmoid()
                experts_NK = self._choose(scores_NE)
                kept_NK = extra_NE = None
                if weights_B2 is not None:
                    outputs = _RouterOutputs(logits_NE, scores_NE, experts_NK, weights_B2, tokens)
                    kept_NK, extra_NE = self._apply_capacity_and_losses(outputs, learning)
            if extra_NE is not None:
                logits_NE = _AddGradient.apply(logits_NE, extra_NE)
            best_NK = logits_NE.gather(1, experts_NK)
            if self.kind == "softmax" or self.per_token == 1:
                # Over the top k: the softmax over all experts, renormalised. A single choice has weight 1
                # in both kinds; only the softmax then has a gradient of exactly 0. AdamW amplifies rounding.
                weights_NK = best_NK.softmax(-1)
            else:
                chosen_NK = best_NK.sigmoid()
                weights_NK = chosen_NK / chosen_NK.sum(-1, keepdim=True)
        return Routing(experts_NK, weights_NK, kept_NK)

    def _choose(self, scores_NE: Tensor) -> Tensor:
        wanted_NE = scores_NE if self.selection_bias is None else scores_NE + self.selection_bias
        experts_NK = wanted_NE.topk(self.per_token, dim=-1).indices
        return experts_NK if self.choose is None else self.choose(wanted_NE, experts_NK)

    def _apply_capacity_and_losses(
        self, outputs: _RouterOutputs, learning: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The mask of pairs within capacity, and the gradient of the auxiliary losses.

        In training it also adds to :attr:`load`.
        """
        tokens, experts_NK, device = outputs.tokens, outputs.experts_NK, outputs.experts_NK.device
        weights_B, tokens_B = outputs.weights_B2.unbind(1)
        num_local, batch, experts = len(experts_NK), len(weights_B), self.num_experts
        length = tokens.length(num_local, batch)
        kept_NK = counts_BE = extra_NE = None
        if self.capacity_factor is not None:
            places_NK, counts_BE = tokens.expert_queue_positions(experts_NK, tokens_B, experts)
            kept_NK = places_NK < math.ceil(self.capacity_factor * length * self.per_token / experts)
        if not learning:
            return kept_NK, None
        sequence_N = tokens.sequence_of(num_local, batch, device)
        real_N = tokens.position_of(num_local, batch, device) < tokens_B[sequence_N]
        own_BE = count_choices(sequence_N, experts_NK, real_N, batch, experts)
        tokens_B1 = tokens_B.clamp(min=1).unsqueeze(1)  # a zero-weight sample has none
        share_N1 = torch.where(real_N, (weights_B / tokens_B1[:, 0])[sequence_N], 0).unsqueeze(1)
        values = own_BE.new_zeros(2)
        if self.auxiliary.balance:
            counts_BE = tokens.all_reduce_counts(own_BE) if counts_BE is None else counts_BE
            frequency_NE = (counts_BE * experts / (tokens_B1 * self.per_token))[sequence_N]
            values[0], extra_NE = self._balance(outputs, frequency_NE, share_N1)
        if self.auxiliary.z:
            values[1], gradient_NE = self._z(outputs, share_N1)
            extra_NE = gradient_NE if extra_NE is None else extra_NE.add_(gradient_NE)
        if self.is_counting and self.load is not None:
            self.load[:experts] += own_BE.sum(0)
            if kept_NK is not None:
                self.load[experts] += (real_N.unsqueeze(1) & ~kept_NK).sum()
            self.load[experts + 1 :] += values
        scale = self.auxiliary.scale()
        return kept_NK, extra_NE if extra_NE is None or scale is None else extra_NE * scale

    def _balance(
        self, outputs: _RouterOutputs, frequency_NE: Tensor, share_N1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The balance loss of the local tokens, and its gradient times its coefficient.

        For a sequence it is E sum_e f_e P_e (Fedus et al. 2021, equations 4 to 6): f_e is the share of its
        (token, slot) pairs at expert e, without a gradient; P_e is its mean router probability of e.

        Args:
            outputs: Outputs of the router.
            frequency_NE: E f_e of each token's sequence.
            share_N1: Each token's share of the batch; 0 for padding.
        """
        scores_NE = outputs.scores_NE
        probabilities_NE = scores_NE / scores_NE.sum(-1, keepdim=True)
        mean_N1 = (frequency_NE * probabilities_NE).sum(-1, keepdim=True)
        gradient_NE = probabilities_NE * (frequency_NE - mean_N1)
        if self.kind == "sigmoid":
            gradient_NE *= 1 - scores_NE
        return (share_N1 * mean_N1).sum(), gradient_NE * (share_N1 * self.auxiliary.balance)

    def _z(self, outputs: _RouterOutputs, share_N1: Tensor) -> tuple[Tensor, Tensor]:
        """The z-loss of the local tokens, log(sum_e exp(logit_e))^2 (Zoph et al. 2022), and its gradient."""
        total_N1 = outputs.logits_NE.logsumexp(-1, keepdim=True)
        gradient_NE = outputs.logits_NE.softmax(-1) * (2 * self.auxiliary.z * share_N1 * total_N1)
        return (share_N1 * total_N1.square()).sum(), gradient_NE


@dataclass(frozen=True)
class _RouterOutputs:
    """A router's outputs for its tokens, without gradients."""

    logits_NE: Tensor
    scores_NE: Tensor
    experts_NK: Tensor
    weights_B2: Tensor
    tokens: Tokens


class _AddGradient(torch.autograd.Function):
    """Identity in the forward pass; the backward pass adds a precomputed gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, extra: Tensor) -> Tensor:
        ctx.save_for_backward(extra)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (extra,) = ctx.saved_tensors
        return grad + extra, None
