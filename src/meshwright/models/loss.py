"""Chunked cross-entropy of the language-model head: never holds the logits of the whole batch.

The float32 logits are the largest tensor of a small model's step: tokens x V x 4 bytes, three times with
their softmax and gradient. Here the tokens pass through the head in chunks. Each chunk's gradient is computed
while its logits are in memory, as the gradient is linear in the loss's own gradient: the backward pass only
scales it. No GEMM runs twice.

With compiled or Triton blocks the loss is **fused**: the logits stay in the 16 bits that the GEMM writes, and
one function reads them twice (maximum and sum together, then the gradient) and writes the gradient in 16 bits
once. On CPUs it is compiled. On GPUs it is a Triton kernel that writes the gradient over the logits, and the
weight-gradient GEMM accumulates in float32 itself.

Shape suffixes: N tokens, C tokens of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the usual alias)
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.data.dataset import IGNORE_INDEX
from meshwright.models.kernels import fused as kernels
from meshwright.models.kernels.gemm import TORCH_GEMMS, Gemms, torch_gemm

Softmax = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
"""From a chunk's float32 logits, which it may overwrite, targets and whether a gradient is needed: the summed
loss, and the gradient of the logits or None. A fused one reads and returns the GEMM's dtype."""


def softmax_loss(logits_CV: Tensor, targets_C: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor | None]:
    """The loss of logits over the whole vocabulary."""
    log_probs_CV = F.log_softmax(logits_CV, dim=-1)
    loss = F.nll_loss(log_probs_CV, targets_C, ignore_index=IGNORE_INDEX, reduction="sum")
    return loss, _softmax_gradient(log_probs_CV, targets_C) if needs_grad else None


def fused_softmax_loss(
    logits_CV: Tensor, targets_C: Tensor, needs_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """The same on 16-bit logits, computed in float32, without in-place operations: to be compiled.

    Maximum, difference, exponential and sum are explicit, so that inductor finds its online softmax, which
    reads the logits once for both the maximum and the sum.
    """
    counted_C1 = (targets_C != IGNORE_INDEX).unsqueeze(1)
    target_C1 = targets_C.clamp(min=0).unsqueeze(1)
    exact_CV = logits_CV.float()
    largest_C1 = exact_CV.amax(-1, keepdim=True)
    lower_CV = exact_CV - largest_C1
    sum_C1 = lower_CV.exp().sum(-1, keepdim=True)
    target_logit_C1 = logits_CV.gather(1, target_C1).float() - largest_C1
    loss = torch.where(counted_C1, sum_C1.log() - target_logit_C1, 0.0).sum()
    if not needs_grad:
        return loss, None
    is_target_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == target_C1
    grad_CV = lower_CV.exp() * (counted_C1 / sum_C1) - (is_target_CV & counted_C1).float()
    return loss, grad_CV.to(logits_CV.dtype)


def _softmax_loss_in_place(
    expected: float, logits_CV: Tensor, targets_C: Tensor, needs_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """The same as a Triton kernel; the gradient, times the expected loss gradient, overwrites the logits."""
    losses_C = kernels.cross_entropy(logits_CV, targets_C, expected, IGNORE_INDEX, needs_grad)
    return losses_C.sum(), logits_CV if needs_grad else None


@functools.cache
def _compile_softmax_loss() -> Softmax:
    """The fused loss, compiled once per chunk size; not on import, which would load the compiler."""
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
    gemms: Gemms = TORCH_GEMMS,
) -> Tensor:
    """The loss **summed** over the targets that are not ``IGNORE_INDEX``, in float32.

    Args:
        x_ND: Input of the head, in the dtype of its GEMM.
        weight_VD: The head's weight.
        targets_N: Token ids to predict.
        chunk: Tokens whose logits are in memory at once.
        softmax: Computes the loss from logits; another one for a vocabulary-parallel head.
        weight_copy_VD: The weight in the GEMM's dtype; cast here if left out.
        fused: Whether a compiled function or a Triton kernel computes the loss, on 16-bit logits.
        expected: The gradient of the loss that the backward pass will start with, if known.
        gemms: Compute the head's GEMMs.
    """
    if not (fused and x_ND.is_cuda and x_ND.dtype == torch.bfloat16):  # fp16 would leave its range
        expected = 1.0
    if fused:
        assert softmax is softmax_loss, "a vocabulary-parallel loss is not fused"
        in_place = functools.partial(_softmax_loss_in_place, expected)
        softmax = in_place if x_ND.is_cuda else _compile_softmax_loss()
    if weight_copy_VD is None:
        weight_copy_VD = weight_VD.detach().to(x_ND.dtype)
    assert weight_copy_VD.dtype == x_ND.dtype, f"weight copy {weight_copy_VD.dtype}, input {x_ND.dtype}"
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(
            x_ND, weight_VD, weight_copy_VD, targets_N, chunk, softmax, fused, expected, gemms
        )
    losses = []
    for x_CD, targets_C in zip(x_ND.split(chunk), targets_N.split(chunk), strict=True):
        with torch.autocast(x_ND.device.type, enabled=False):
            losses.append(softmax(_logits(gemms, x_CD, weight_copy_VD, fused), targets_C, False)[0])
    return torch.stack(losses).sum()


def _logits(gemms: Gemms, x_CD: Tensor, weight_copy_VD: Tensor, fused: bool) -> Tensor:
    """In float32 unless fused; on return the 16-bit ones are freed."""
    logits_CV = gemms.forward(x_CD, weight_copy_VD)
    return logits_CV if fused else logits_CV.float()


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients in the forward pass, chunk by chunk."""

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
        gemms: Gemms,
    ) -> Tensor:
        grad_x_ND = torch.empty_like(x_ND)
        in_gemm = fused and weight_VD.dtype != x_ND.dtype
        in_gemm = in_gemm and _gemm_accumulates_float32(x_ND.device, x_ND.dtype)
        grad_weight_VD = torch.empty_like(weight_VD) if in_gemm else torch.zeros_like(weight_VD)
        losses = []
        with torch.autocast(x_ND.device.type, enabled=False):
            for start in range(0, len(x_ND), chunk):
                part = slice(start, start + chunk)
                x_CD, targets_C = x_ND[part], targets_N[part]
                loss, exact_CV = softmax(_logits(gemms, x_CD, weight_copy_VD, fused), targets_C, True)
                assert exact_CV is not None, "a gradient was asked for"
                losses.append(loss)
                grad_CV = exact_CV.to(x_ND.dtype)
                del exact_CV
                gemms.input_grad(grad_CV, weight_copy_VD, out=grad_x_ND[part])
                if in_gemm:
                    gemms.accumulate_weight_grad(grad_weight_VD, grad_CV, x_CD, first=start == 0)
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
        ctx.gradients = None  # so autograd takes over the weight gradient instead of copying it
        # A GPU would divide by a CPU scalar by multiplying with its inverse, and not get 1.
        factor = grad / torch.full_like(grad, ctx.expected)
        for computed in (grad_x_ND, grad_weight_VD):
            if ctx.fused:
                kernels.scale(computed, factor)
            else:
                computed.mul_(factor)
        return grad_x_ND, grad_weight_VD, *[None] * 7


@functools.cache
def _gemm_accumulates_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether 16-bit GEMMs of a device accumulate into float32: not on CPUs, and not in older torch."""
    if device.type != "cuda":
        return False
    part, total = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(16, 16, device=device)
    try:
        torch_gemm("weight", part, part, torch.float32, total, add=True)
    except RuntimeError:
        return False
    return True


def _softmax_gradient(log_probs_CV: Tensor, targets_C: Tensor) -> Tensor:
    """Probabilities minus one at the target, zero for ignored targets; in place."""
    counted_C1 = (targets_C != IGNORE_INDEX).unsqueeze(1)
    rows_C = torch.arange(len(targets_C), device=targets_C.device)
    probs_CV = log_probs_CV.exp_()
    probs_CV[rows_C, targets_C.clamp(min=0)] -= 1.0  # sets elements: deterministic on every device
    return probs_CV.mul_(counted_C1)
