"""Cross-entropy of a linear head that never holds the logits of the whole batch.

The logits of V words in float32 are the largest tensor of a small model's step: tokens x V x 4 bytes, three
times over with their softmax and gradient. Here the tokens go through the head in chunks. Each chunk's
gradient is made while its logits are there, as the loss is linear in it: the backward pass only scales what
was made. No product is computed twice.

Where the model is compiled the loss is **fused**: the logits stay in the 16 bits that the product writes, and
one function reads them twice (largest and sum together, then the gradient) and writes the gradient in 16 bits
once. On a CPU it is compiled. On a GPU it is a kernel of our own, which writes the gradient in the logits'
place, and the product that makes the head's gradient adds to it in float32 itself.

Shape suffixes: N tokens, C tokens of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.data.dataset import IGNORE_INDEX
from meshwright.models.kernels import fused as kernels
from meshwright.models.kernels import gemm

Softmax = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
"""Of a chunk's logits in float32, which it may overwrite, and targets: the summed loss, and, where it is
wanted, the loss's gradient by the logits. A fused one reads logits as the product writes them, and gives a
gradient as the next product reads it."""


def softmax_loss(logits_CV: Tensor, targets_C: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor | None]:
    """The loss of logits of all words."""
    log_probs_CV = F.log_softmax(logits_CV, dim=-1)
    loss = F.nll_loss(log_probs_CV, targets_C, ignore_index=IGNORE_INDEX, reduction="sum")
    return loss, _softmax_gradient(log_probs_CV, targets_C) if needs_grad else None


def fused_softmax_loss(
    logits_CV: Tensor, targets_C: Tensor, needs_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """The same of logits in 16 bits, computed in float32, without operations in place: to be compiled.

    Largest, difference, exponential and sum are written out: so inductor finds its online softmax, which
    reads the logits once for both the largest and the sum.
    """
    counted_C1 = (targets_C != IGNORE_INDEX).unsqueeze(1)
    target_C1 = targets_C.clamp(min=0).unsqueeze(1)
    exact_CV = logits_CV.float()
    largest_C1 = exact_CV.amax(-1, keepdim=True)
    lower_CV = exact_CV - largest_C1
    sum_C1 = lower_CV.exp().sum(-1, keepdim=True)
    of_target_C1 = logits_CV.gather(1, target_C1).float() - largest_C1
    loss = torch.where(counted_C1, sum_C1.log() - of_target_C1, 0.0).sum()
    if not needs_grad:
        return loss, None
    is_target_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == target_C1
    grad_CV = lower_CV.exp() * (counted_C1 / sum_C1) - (is_target_CV & counted_C1).float()
    return loss, grad_CV.to(logits_CV.dtype)


def _softmax_loss_in_place(
    expected: float, logits_CV: Tensor, targets_C: Tensor, needs_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """The same by a kernel for GPUs; the gradient, times the expected one, takes the place of the logits."""
    losses_C = kernels.cross_entropy(logits_CV, targets_C, expected, IGNORE_INDEX, needs_grad)
    return losses_C.sum(), logits_CV if needs_grad else None


@functools.cache
def _compile_softmax_loss() -> Softmax:
    """The fused loss, compiled once for each size of chunk; not on import, which would load the compiler."""
    return torch.compile(fused_softmax_loss, dynamic=False)


def linear_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    chunk: int,
    softmax: Softmax = softmax_loss,
    weight_copy_VD: Tensor | None = None,
    fused: bool = False,
    expected: float = 1.0,
) -> Tensor:
    """The loss **summed** over the targets that are not ``IGNORE_INDEX``, in float32.

    Args:
        x_ND: What the head reads, in the precision of its product.
        weight_VD: The head's weight.
        targets_N: Words to predict.
        chunk: Tokens whose logits are held at once.
        softmax: Makes the loss of logits; another one where a rank has those of some words alone.
        weight_copy_VD: The weight in the precision of the GEMM, where a copy is kept; else it is made here.
        fused: Whether a compiled function makes the loss, of logits that stay in the product's precision.
        expected: The gradient of the loss that the backward pass will begin with, if it is known.
    """
    if not (fused and x_ND.is_cuda and x_ND.dtype == torch.bfloat16):  # of fp16 it would leave the range
        expected = 1.0
    if fused:
        assert softmax is softmax_loss, "a loss that asks other ranks is not compiled"
        in_place = functools.partial(_softmax_loss_in_place, expected)
        softmax = in_place if x_ND.is_cuda else _compile_softmax_loss()
    if weight_copy_VD is None:
        weight_copy_VD = weight_VD.detach().to(x_ND.dtype)
    assert weight_copy_VD.dtype == x_ND.dtype, (
        f"the head's copy is {weight_copy_VD.dtype}, what it reads is {x_ND.dtype}"
    )
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(
            x_ND, weight_VD, weight_copy_VD, targets_N, chunk, softmax, fused, expected
        )
    losses = []
    for x_CD, targets_C in zip(x_ND.split(chunk), targets_N.split(chunk), strict=True):
        with torch.autocast(x_ND.device.type, enabled=False):
            losses.append(softmax(_logits(x_CD, weight_copy_VD, fused), targets_C, False)[0])
    return torch.stack(losses).sum()


def _logits(x_CD: Tensor, weight_copy_VD: Tensor, fused: bool) -> Tensor:
    logits_CV = gemm.forward(x_CD, weight_copy_VD)
    return logits_CV if fused else logits_CV.float()


class _LinearCrossEntropy(torch.autograd.Function):
    """Makes the gradients in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        weight_copy_VD: Tensor,
        targets_N: Tensor,
        chunk: int,
        softmax: Softmax,
        fused: bool,
        expected: float,
    ) -> Tensor:
        grad_x_ND = torch.empty_like(x_ND)
        in_gemm = (
            fused and weight_VD.dtype != x_ND.dtype and _gemm_accumulates_float32(x_ND.device, x_ND.dtype)
        )
        grad_weight_VD = torch.empty_like(weight_VD) if in_gemm else torch.zeros_like(weight_VD)
        losses = []
        with torch.autocast(x_ND.device.type, enabled=False):
            for start in range(0, len(x_ND), chunk):
                part = slice(start, start + chunk)
                x_CD, targets_C = x_ND[part], targets_N[part]
                loss, exact_CV = softmax(_logits(x_CD, weight_copy_VD, fused), targets_C, True)
                assert exact_CV is not None, "the gradient was wanted"
                losses.append(loss)
                grad_CV = exact_CV.to(x_ND.dtype)
                del exact_CV
                gemm.input_grad(grad_CV, weight_copy_VD, out=grad_x_ND[part])
                if in_gemm:
                    gemm.accumulate_weight_grad(grad_weight_VD, grad_CV, x_CD, first=start == 0)
                elif weight_VD.dtype == x_ND.dtype:
                    grad_weight_VD.addmm_(grad_CV.T, x_CD)
                else:
                    grad_weight_VD.add_(grad_CV.T @ x_CD)  # summed over chunks in float32
                del grad_CV  # or it would live beside the next chunk's logits
        ctx.gradients, ctx.expected, ctx.fused = (grad_x_ND, grad_weight_VD), expected, fused
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_ND, grad_weight_VD = ctx.gradients
        ctx.gradients = None  # the weight's gradient is then taken over, not copied
        # Divided by a number of the host, a GPU would multiply with its inverse, and not get 1.
        factor = grad / torch.full_like(grad, ctx.expected)
        for made in (grad_x_ND, grad_weight_VD):
            if ctx.fused:
                kernels.scale(made, factor)
            else:
                made.mul_(factor)
        return grad_x_ND, grad_weight_VD, None, None, None, None, None, None


@functools.cache
def _gemm_accumulates_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this device add to a float32 sum: no CPU's do, and older torches' do not."""
    if device.type != "cuda":
        return False
    part, total = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(16, 16, device=device)
    try:
        gemm.accumulate_weight_grad(total, part, part, first=False)
    except RuntimeError:
        return False
    return True


def _softmax_gradient(log_probs_CV: Tensor, targets_C: Tensor) -> Tensor:
    """Probabilities less one at the target, zero for ignored targets; in place."""
    counted_C1 = (targets_C != IGNORE_INDEX).unsqueeze(1)
    rows_C = torch.arange(len(targets_C), device=targets_C.device)
    probs_CV = log_probs_CV.exp_()
    probs_CV[rows_C, targets_C.clamp(min=0)] -= 1.0  # sets elements: deterministic on every device
    return probs_CV.mul_(counted_C1)
