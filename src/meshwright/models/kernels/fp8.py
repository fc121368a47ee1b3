"""Matrix products in 8 bits: ``torch._scaled_mm`` on e4m3 values with one scale for each row.

Four bits of mantissa leave each value within 6% of what it was, down to 1/28,672 of the largest of its row. A
product wants each scale to belong to a row of its operand: what is summed over must share one. So the values
of a layer are cast once, by the rows that the forward pass sums over; in the backward pass the gradient,
which is cast for each of its two products anyway, takes in the scale that would be in the way::

    y  = s_x s_w (X W')          x = s_x X by tokens, w = s_w W by outputs
    dx = s_g (G W)               grad s_w = s_g G by tokens
    dw = s_h (H' X)              grad s_x = s_h H by outputs

The backward pass thus differentiates the product that was computed, and neither input nor weight is looked
through a second time for the largest value of its other dim. Tensor cores read 8-bit operands along the dim
that is summed over, hence the transposed copies. All of it is plain torch without a wait for the device: the
compiler joins casts with the norm or activation before them. Blocks of our own kernels (``fused``) do the
same but for dw: there both operands are cast by columns from 16 bits, each with scales of its own.

Shape suffixes: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
"""Of e4m3."""
MIN_AMAX = 2.0**-100
"""Rows of zeros get a scale too; far below any gradient, far above the least float32."""
ALIGNMENT = 16
"""Both dims of a matrix that is read in 8 bits are multiples of this many bytes."""
BACKWARD_FAST_ACCUM = False
"""Whether the backward pass, too, sums without the extra float32 register."""


def cast_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values in 8 bits and the scale of each row, float32."""
    scale = _scales(x.abs().amax(1, keepdim=True))
    return cast(x, scale), scale


def cast_columns(x: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same by columns, and transposed: each column becomes a row with its scale.

    Args:
        x: The values.
        amax: The largest of each column, where it is known.
    """
    scale = _scales(x.abs().amax(0) if amax is None else amax)
    return _transpose(cast(x, scale)), scale.view(-1, 1)


def _scales(amax: Tensor) -> Tensor:
    return amax.float().clamp(min=MIN_AMAX) / E4M3_MAX


def cast(x: Tensor, scale: Tensor) -> Tensor:
    """Values in 8 bits, by scales that are known."""
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


@torch.library.custom_op("meshwright::transpose", mutates_args=())
def transpose(cast: Tensor) -> Tensor:
    """Transposed, by a kernel of its own.

    The compiler would join it with the search for the largest of each row, and then write byte by byte to
    places far apart. It does not look into this: what is cast lies in memory by rows before it is turned.
    """
    return (_compiled_transpose() if cast.is_cuda else _transpose)(cast)


@transpose.register_fake
def _(cast: Tensor) -> Tensor:
    return cast.new_empty(cast.shape[1], cast.shape[0])


def _transpose(x: Tensor) -> Tensor:
    return x.t().contiguous()


@functools.cache
def _compiled_transpose() -> Callable[[Tensor], Tensor]:
    """Torch's own copy reads or writes with gaps; the compiler's goes tile by tile. One for all shapes."""
    return torch.compile(_transpose, dynamic=True)


def is_fp8_shape(outputs: int, inputs: int) -> bool:
    """Whether a weight has a shape that 8-bit products take."""
    return outputs % ALIGNMENT == 0 and inputs % ALIGNMENT == 0


def scaled_mm(
    a: Tensor, b_transposed: Tensor, scale_a: Tensor, scale_b: Tensor | None, fast: bool, exact: bool = False
) -> Tensor:
    """``a b``; both are read along their rows, so ``b`` is given transposed.

    Args:
        a: In 8 bits.
        b_transposed: Likewise.
        scale_a: Of its rows.
        scale_b: Likewise; None where those have gone into the other operand.
        fast: Whether sums do without the extra float32 register.
        exact: Whether what comes out is float32, not bfloat16: on GPUs, as CPUs round.
    """
    if scale_b is None:
        scale_b = torch.ones(b_transposed.shape[0], dtype=torch.float32, device=b_transposed.device)
    dtype = torch.float32 if exact and a.is_cuda else torch.bfloat16
    out = torch._scaled_mm(
        a, b_transposed.t(), scale_a, scale_b.view(1, -1), out_dtype=dtype, use_fast_accum=fast
    )
    return out.float() if exact else out


def forward(x_NI: Tensor, scale_N1: Tensor, weight_OI: Tensor) -> Tensor:
    """``x W'``.

    Args:
        x_NI: In 8 bits.
        scale_N1: Of its rows.
        weight_OI: In 16 bits or more.
    """
    cast_OI, scale_O1 = cast_rows(weight_OI)
    return scaled_mm(x_NI, cast_OI, scale_N1, scale_O1, fast=True)


def input_grad(grad_NO: Tensor, weight_OI: Tensor) -> Tensor:
    """Gradient of a product's input.

    Args:
        grad_NO: Of its output.
        weight_OI: As the forward product read it.
    """
    cast_OI, scale_O1 = cast_rows(weight_OI)
    cast_NO, scale_N1 = cast_rows(grad_NO.float() * scale_O1.view(1, -1))
    weight_IO = transpose(cast_OI)
    return scaled_mm(cast_NO, weight_IO, scale_N1, None, BACKWARD_FAST_ACCUM)


def weight_grad(grad_NO: Tensor, x_NI: Tensor, scale_N1: Tensor) -> Tensor:
    """Gradient of a product's weight.

    Args:
        grad_NO: Of its output.
        x_NI: Its input, in 8 bits.
        scale_N1: Of the rows of that.
    """
    cast_ON, scale_O1 = cast_columns(grad_NO.float() * scale_N1)
    x_IN = transpose(x_NI)
    return scaled_mm(cast_ON, x_IN, scale_O1, None, BACKWARD_FAST_ACCUM, exact=True)
