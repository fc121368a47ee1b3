"""Grouped GEMM of experts: rows are sorted by expert, and each group is multiplied by its expert's weight.

Two custom ops, ``meshwright::grouped_gemm`` and its backward: activation checkpointing treats the first as
one GEMM, a dry run gets its shape without computing, and memory tracking counts one output, not one per
expert. The weight gradient of an expert without rows is zero, never None.

On GPUs in bf16 it is torch's grouped GEMM if rows are multiples of 16 bytes; elsewhere one GEMM per group.

Shape suffixes: R rows, I and O input and output width, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNMENT_BYTES = 16
"""Torch's grouped GEMM needs rows of a multiple of this."""


@torch.library.custom_op("meshwright::grouped_gemm", mutates_args=())
def grouped_gemm(x_RI: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> Tensor:
    """Rows times their experts' weights, (R, O).

    Args:
        x_RI: Rows, sorted by expert.
        weight: (E x O, I), the experts' weights concatenated, in the rows' dtype.
        bias: (E x O,), or None.
        sizes: Rows of each expert; they sum to R.
    """
    weight_EOI = weight.view(len(sizes), -1, x_RI.shape[1])
    with torch.autocast(x_RI.device.type, enabled=False):
        if _is_fused(x_RI, weight_EOI):
            out_RO = torch._grouped_mm(x_RI, weight_EOI.transpose(1, 2), offs=_ends(sizes, x_RI.device))
        else:
            out_RO = x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[1])
            for expert, run in _runs(sizes):
                torch.mm(x_RI[run], weight_EOI[expert].T, out=out_RO[run])
        if bias is not None:
            for expert, run in _runs(sizes):
                out_RO[run] += bias.view(len(sizes), -1)[expert]
    return out_RO


@grouped_gemm.register_fake
def _(x_RI: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> Tensor:
    return x_RI.new_empty(x_RI.shape[0], weight.shape[0] // len(sizes))


@torch.library.custom_op("meshwright::grouped_gemm_backward", mutates_args=())
def grouped_gemm_backward(
    grad_RO: Tensor, x_RI: Tensor, weight: Tensor, sizes: Sequence[int], with_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the rows, the weights and the biases (empty without biases)."""
    weight_EOI = weight.view(len(sizes), -1, x_RI.shape[1])
    grad_RO = grad_RO.contiguous()
    with torch.autocast(x_RI.device.type, enabled=False):
        if _is_fused(x_RI, weight_EOI):
            ends = _ends(sizes, x_RI.device)
            grad_x_RI = torch._grouped_mm(grad_RO, weight_EOI, offs=ends)
            grad_EOI = torch._grouped_mm(grad_RO.T, x_RI, offs=ends)
        else:
            grad_x_RI, grad_EOI = torch.empty_like(x_RI), torch.empty_like(weight_EOI)
            for expert, run in _runs(sizes):
                torch.mm(grad_RO[run], weight_EOI[expert], out=grad_x_RI[run])
                torch.mm(grad_RO[run].T, x_RI[run], out=grad_EOI[expert])
        for expert, size in enumerate(sizes):
            if not size:
                grad_EOI[expert].zero_()
        grad_bias = grad_RO.new_zeros(weight.shape[0] if with_bias else 0)
        if with_bias:
            for expert, run in _runs(sizes):
                grad_bias.view(len(sizes), -1)[expert] = grad_RO[run].sum(0)
    return grad_x_RI, grad_EOI.view_as(weight), grad_bias


@grouped_gemm_backward.register_fake
def _(
    grad_RO: Tensor, x_RI: Tensor, weight: Tensor, sizes: Sequence[int], with_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    bias = grad_RO.new_empty(weight.shape[0] if with_bias else 0)
    return torch.empty_like(x_RI), torch.empty_like(weight), bias


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_RI, weight, bias, sizes = inputs
    ctx.save_for_backward(x_RI, weight)
    ctx.sizes, ctx.with_bias = list(sizes), bias is not None


def _backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:
    grads = grouped_gemm_backward(grad_RO, *ctx.saved_tensors, ctx.sizes, ctx.with_bias)
    return grads[0], grads[1], grads[2] if ctx.with_bias else None, None


grouped_gemm.register_autograd(_backward, setup_context=_keep_inputs)
GROUPED_GEMM = torch.ops.meshwright.grouped_gemm.default
"""The op as dispatch modes see it."""


def _runs(sizes: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and its rows."""
    start = 0
    for expert, size in enumerate(sizes):
        if size:
            yield expert, slice(start, start + size)
        start += size


def _ends(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Where each expert's rows end, for torch's grouped GEMM."""
    return torch.tensor(sizes).cumsum(0).to(device, torch.int32, non_blocking=True)


def _is_fused(x_RI: Tensor, weight_EOI: Tensor) -> bool:
    """Whether torch's grouped GEMM supports the operands."""
    if not x_RI.is_cuda or x_RI.dtype != torch.bfloat16 or not len(x_RI):
        return False
    return all(width * x_RI.element_size() % ALIGNMENT_BYTES == 0 for width in weight_EOI.shape[1:])
