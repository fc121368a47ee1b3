"""FP8 GEMMs: ``torch._scaled_mm`` on e4m3 values with one scale per row.

e4m3 has four bits of precision: a value is within 6% of the original, down to 1/28,672 of its row's largest.
Row scales must not lie along the dim that a GEMM reduces. Linear layers of torch modules (``linear``) cast x
and W once, along the dim that the forward GEMM reduces. Their backward pass folds the scale that lies along
the reduced dim into the gradient, which is cast for each of its two GEMMs anyway::

    y  = s_x s_w (X W')          x = s_x X by tokens, w = s_w W by outputs
    dx = s_g (G W)               grad s_w = s_g G by tokens
    dw = s_h (H' X)              grad s_x = s_h H by outputs

So the backward pass differentiates the GEMM that ran, and x and W need no second search for their largest
values. Triton blocks (``triton_block``) do the same except for dw: they cast both operands by columns from 16
bits, each with its own scales.

Tensor cores read FP8 operands along the reduced dim; this is why transposed copies exist. The casts here are
plain torch operations without a device sync: torch.compile fuses them with the norm or activation before
them. ``fused`` has the same casts as Triton kernels.

Shape suffixes: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
MIN_AMAX = 2.0**-100
"""Rows of zeros get a scale too; far below any gradient, far above the smallest float32."""
ALIGNMENT = 16
"""Both dims of an FP8 operand are multiples of this many bytes."""
BACKWARD_FAST_ACCUM = False
"""Whether the backward GEMMs accumulate without the extra float32 register."""


class GemmOperand(NamedTuple):
    """An operand that a GEMM reads along its rows."""

    values: Tensor
    scale: Tensor | None = None
    """Scale of each row, (N, 1), for FP8 values; None for 16 bits, or if the other operand includes it."""


def cast_rows(x: Tensor, by: Tensor | None = None) -> GemmOperand:
    """FP8 values and the float32 scale of each row; of the values times one factor per column, if given."""
    if by is not None:
        x = x.float() * by.view(1, -1)
    scale = _scales(x.abs().amax(1, keepdim=True))
    return GemmOperand(cast(x, scale), scale)


def cast_columns(x: Tensor, amax: Tensor | None = None) -> GemmOperand:
    """FP8 values by columns, transposed: each column becomes a row with its scale.

    Args:
        x: The values.
        amax: Largest magnitude of each column, if known.
    """
    scale = _scales(x.abs().amax(0) if amax is None else amax)
    return GemmOperand(_transpose(cast(x, scale)), scale.view(-1, 1))


def _scales(amax: Tensor) -> Tensor:
    return amax.float().clamp(min=MIN_AMAX) / E4M3_MAX


def cast(x: Tensor, scale: Tensor) -> Tensor:
    """FP8 values for known scales."""
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


@torch.library.custom_op("meshwright::transpose", mutates_args=())
def transpose(cast: Tensor) -> Tensor:
    """The transpose, as a kernel of its own.

    torch.compile would fuse it with the row-wise amax and then write single bytes far apart. A custom op is
    opaque to it: the cast values are in memory, row by row, before they are transposed.
    """
    return (_compiled_transpose() if cast.is_cuda else _transpose)(cast)


@transpose.register_fake
def _(cast: Tensor) -> Tensor:
    return cast.new_empty(cast.shape[1], cast.shape[0])


def _transpose(x: Tensor) -> Tensor:
    return x.t().contiguous()


@functools.cache
def _compiled_transpose() -> Callable[[Tensor], Tensor]:
    """Torch's copy reads or writes with gaps; the compiled one works in tiles. One for all shapes."""
    return torch.compile(_transpose, dynamic=True)


def is_fp8_shape(outputs: int, inputs: int) -> bool:
    """Whether FP8 GEMMs support a weight's shape."""
    return outputs % ALIGNMENT == 0 and inputs % ALIGNMENT == 0


def forward(x: GemmOperand, weight: GemmOperand) -> Tensor:
    """``x W'``, in bfloat16."""
    return scaled_mm(x, weight, fast=True)


def input_grad(grad: GemmOperand, weight_IO: Tensor) -> Tensor:
    """``grad W``, in bfloat16.

    Args:
        grad: Output gradient by rows, with the weight's scales folded in.
        weight_IO: FP8 values of the weight, transposed.
    """
    return scaled_mm(grad, GemmOperand(weight_IO), BACKWARD_FAST_ACCUM)


def weight_grad(grad_ON: GemmOperand, x_IN: GemmOperand, exact: bool = True) -> Tensor:
    """``grad' x``, in float32 if exact, else in bfloat16.

    Args:
        grad_ON: Output gradient by columns.
        x_IN: Input by columns; without a scale if the gradient includes it.
        exact: Whether the result is float32.
    """
    return scaled_mm(grad_ON, x_IN, BACKWARD_FAST_ACCUM, exact)


def scaled_mm(a: GemmOperand, b_transposed: GemmOperand, fast: bool, exact: bool = False) -> Tensor:
    """``a b``; both operands are read along their rows, so ``b`` is given transposed.

    Args:
        a: With scales.
        b_transposed: Its scales are one where it has none.
        fast: Whether to accumulate without the extra float32 register.
        exact: Whether the result is float32, not bfloat16: unrounded on GPUs, CPUs round.
    """
    scale_a, scale_b = a.scale, b_transposed.scale
    assert scale_a is not None, "the left operand has scales"
    if scale_b is None:
        values = b_transposed.values
        scale_b = torch.ones(values.shape[0], dtype=torch.float32, device=values.device)
    dtype = torch.float32 if exact and a.values.is_cuda else torch.bfloat16
    out = torch._scaled_mm(
        a.values,
        b_transposed.values.t(),
        scale_a,
        scale_b.view(1, -1),
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    return out.float() if exact else out
