"""Matrix products in 8 bits: ``torch._scaled_mm`` on e4m3 values with one scale for each row.

Four bits of mantissa leave each value within 6% of what it was, down to 1/28,672 of the largest of its row. A
product wants each scale to belong to a row of its result: what is summed over must share one. So the values of
a layer are cast once, by the rows that the forward pass sums over, and in the backward pass the gradient, which
is cast for each of its two products anyway, takes in the scale that would be in the way::

    y  = s_x s_w (X W')          x = s_x X by tokens, w = s_w W by outputs
    dx = s_g (G W)               grad s_w = s_g G by tokens
    dw = s_h (H' X)              grad s_x = s_h H by outputs

The backward pass thus differentiates the product that was computed, and neither input nor weight is looked
through a second time for the largest value of its other dim. Tensor cores read 8-bit operands along the dim
that is summed over, hence the transposed copies. All of it is plain torch without a wait for the device: the
compiler joins casts with the norm or activation before them.

Shape suffixes: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor
from torch.autograd.function import once_differentiable

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of e4m3."""
LEAST_AMAX = 2.0**-100
"""Rows of zeros get a scale too; far below any gradient, far above the least float32."""
ALIGNED = 16
"""Both dims of a matrix that is read in 8 bits are multiples of this many bytes."""
WEIGHT_GRADIENT_IN_FP8 = True
"""Whether the gradient of the weight is an 8-bit product as well; else it is one of 16 bits."""
FAST_BACKWARD = False
"""Whether the backward pass, too, sums without the extra float32 register."""


class ScaledMatrix(NamedTuple):
    """A weight in 8 bits, both ways round."""

    rows_OI: Tensor
    """As it is: what the forward pass reads."""
    turned_IO: Tensor
    """The same values, transposed: what the gradient of the input reads."""
    scale_O1: Tensor


def cast_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values in 8 bits and the scale of each row, float32."""
    scale = _scales(x, dim=1)
    return _cast(x, scale), scale


def cast_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same by columns, and transposed: each column becomes a row with its scale."""
    scale = _scales(x, dim=0)
    return _cast(x, scale).t().contiguous(), scale.view(-1, 1)


def _scales(x: Tensor, dim: int) -> Tensor:
    amax = x.abs().amax(dim, keepdim=True).float()
    return amax.clamp(min=LEAST_AMAX) / LARGEST


def _cast(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3)


def scale_matrix(weight_OI: Tensor) -> ScaledMatrix:
    """Both casts of a weight."""
    rows_OI, scale_O1 = cast_rows(weight_OI)
    return ScaledMatrix(rows_OI, rows_OI.t().contiguous(), scale_O1)


def can_scale(weight_OI: Tensor) -> bool:
    """Whether the shape is one that 8-bit products take."""
    return not any(size % ALIGNED for size in weight_OI.shape)


def _multiply(a: Tensor, b_turned: Tensor, scale_a: Tensor, scale_b_turned: Tensor, fast: bool) -> Tensor:
    """``a b``; both are read along their rows, so ``b`` is given transposed."""
    return torch._scaled_mm(
        a, b_turned.t(), scale_a, scale_b_turned.view(1, -1), out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def _ones(rows: int, like: Tensor) -> Tensor:
    return torch.ones((rows, 1), dtype=torch.float32, device=like.device)


def input_gradient(grad_NO: Tensor, matrix: ScaledMatrix) -> Tensor:
    """Gradient of a product's input."""
    cast_NO, scale_N1 = cast_rows(grad_NO.float() * matrix.scale_O1.t())
    turned_IO = matrix.turned_IO
    return _multiply(cast_NO, turned_IO, scale_N1, _ones(turned_IO.shape[0], turned_IO), FAST_BACKWARD)


def weight_gradient(grad_NO: Tensor, x_NI: Tensor, scale_N1: Tensor) -> Tensor:
    """Gradient of a product's weight.

    Args:
        grad_NO: Of its output.
        x_NI: Its input, in 8 bits.
        scale_N1: Of the rows of that.
    """
    cast_ON, scale_O1 = cast_columns(grad_NO.float() * scale_N1)
    x_IN = x_NI.t().contiguous()
    return _multiply(cast_ON, x_IN, scale_O1, _ones(x_IN.shape[0], x_IN), FAST_BACKWARD)


class _ScaledProduct(torch.autograd.Function):
    """``x W'`` in 8 bits; the gradient of the weight has the weight's precision."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, *matrix: Tensor) -> Tensor:
        scaled = ScaledMatrix(*matrix)
        cast_NI, scale_N1 = cast_rows(x_NI)
        ctx.in_fp8 = WEIGHT_GRADIENT_IN_FP8 and x_NI.shape[0] % ALIGNED == 0
        kept = (cast_NI, scale_N1) if ctx.in_fp8 else (x_NI.bfloat16(),)
        ctx.save_for_backward(*scaled, *kept)
        ctx.x_dtype, ctx.weight_dtype = x_NI.dtype, weight_OI.dtype
        return _multiply(cast_NI, scaled.rows_OI, scale_N1, scaled.scale_O1, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        scaled, kept = ScaledMatrix(*ctx.saved_tensors[:3]), ctx.saved_tensors[3:]
        grad_NI = input_gradient(grad_NO, scaled).to(ctx.x_dtype)
        grad_OI = weight_gradient(grad_NO, *kept) if ctx.in_fp8 else grad_NO.t() @ kept[0]
        return grad_NI, grad_OI.to(ctx.weight_dtype), None, None, None


def multiply_scaled(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """``x W' + b`` in 8 bits, out in bfloat16; the product of 16 bits where the shape is none for it."""
    if not can_scale(weight_OI):
        return F.linear(x, weight_OI, bias_O)
    out_NO = _ScaledProduct.apply(x.flatten(0, -2), weight_OI, *scale_matrix(weight_OI.detach()))
    out = out_NO.unflatten(0, x.shape[:-1])
    return out if bias_O is None else out + bias_O.to(out.dtype)
