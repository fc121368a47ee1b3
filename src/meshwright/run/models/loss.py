"""Cross-entropy of a linear head that never holds the logits of the whole batch.

The logits of V words in float32 are the largest tensor of a small model's step: tokens x V x 4 bytes, three
times over with their softmax and gradient. Here the tokens go through the head in chunks. Each chunk's
gradient is made while its logits are there, as the loss is linear in it: the backward pass only scales what
was made. No product is computed twice.

Shape suffixes: N tokens, C tokens of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.prepare.dataset import IGNORED

Softmax = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
"""Of a chunk's logits in float32, which it may overwrite, and targets: the summed loss, and, where it is
wanted, the loss's gradient by the logits."""


def softmax_loss(logits_CV: Tensor, targets_C: Tensor, wanted: bool) -> tuple[Tensor, Tensor | None]:
    """The loss of logits of all words."""
    log_probs_CV = F.log_softmax(logits_CV, dim=-1)
    loss = F.nll_loss(log_probs_CV, targets_C, ignore_index=IGNORED, reduction="sum")
    return loss, _softmax_gradient(log_probs_CV, targets_C) if wanted else None


def linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunk: int, softmax: Softmax = softmax_loss
) -> Tensor:
    """The loss **summed** over the targets that are not ``IGNORED``, in float32.

    Args:
        x_ND: What the head reads, in the precision of its product.
        weight_VD: The head's weight.
        targets_N: Words to predict.
        chunk: Tokens whose logits are held at once.
        softmax: Makes the loss of logits; another one where a rank has those of some words alone.
    """
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(x_ND, weight_VD, targets_N, chunk, softmax)
    low_VD = weight_VD.to(x_ND.dtype)
    losses = [
        softmax(_logits(x_CD, low_VD), targets_C, False)[0]
        for x_CD, targets_C in zip(x_ND.split(chunk), targets_N.split(chunk), strict=True)
    ]
    return torch.stack(losses).sum()


def _logits(x_CD: Tensor, weight_VD: Tensor) -> Tensor:
    with torch.autocast(x_CD.device.type, enabled=False):
        return (x_CD @ weight_VD.T).float()


class _LinearCrossEntropy(torch.autograd.Function):
    """Makes the gradients in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunk: int, softmax: Softmax
    ) -> Tensor:
        low_VD = weight_VD.to(x_ND.dtype)
        grad_x_ND = torch.empty_like(x_ND)
        grad_weight_VD = torch.zeros_like(weight_VD)
        losses = []
        for start in range(0, len(x_ND), chunk):
            part = slice(start, start + chunk)
            x_CD, targets_C = x_ND[part], targets_N[part]
            loss, exact_CV = softmax(_logits(x_CD, low_VD), targets_C, True)
            assert exact_CV is not None, "the gradient was wanted"
            losses.append(loss)
            grad_CV = exact_CV.to(x_ND.dtype)
            del exact_CV
            with torch.autocast(x_ND.device.type, enabled=False):
                torch.mm(grad_CV, low_VD, out=grad_x_ND[part])
                if weight_VD.dtype == x_ND.dtype:
                    grad_weight_VD.addmm_(grad_CV.T, x_CD)
                else:
                    grad_weight_VD.add_(grad_CV.T @ x_CD)  # summed over chunks in float32
            del grad_CV  # or it would live beside the next chunk's logits
        ctx.gradients = (grad_x_ND, grad_weight_VD)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_ND, grad_weight_VD = ctx.gradients
        ctx.gradients = None  # the weight's gradient is then taken over, not copied
        return grad_x_ND.mul_(grad), grad_weight_VD.mul_(grad), None, None, None


def _softmax_gradient(log_probs_CV: Tensor, targets_C: Tensor) -> Tensor:
    """Probabilities less one at the target, zero for ignored targets; in place."""
    counted_C1 = (targets_C != IGNORED).unsqueeze(1)
    rows_C = torch.arange(len(targets_C), device=targets_C.device)
    probs_CV = log_probs_CV.exp_()
    probs_CV[rows_C, targets_C.clamp(min=0)] -= 1.0  # sets elements: deterministic on every device
    return probs_CV.mul_(counted_C1)
