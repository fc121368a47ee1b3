"""Products of 16-bit matrices by the algorithm that was chosen for their shape; by torch's where none was.

What was chosen holds for the whole process, as a library's settings do (``run.race`` chooses). Nothing is
chosen on CPUs.

Shape suffixes: N tokens, I and O inputs and outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from meshwright.layout.gemms import Kind
from meshwright.models.kernels.cublas import ALIGNED_BYTES, GemmShape
from meshwright.models.linear import float32_weight_grad


class Algorithm(Protocol):
    """Computes products of one shape."""

    def __call__(self, left: Tensor, right: Tensor, out: Tensor, add: bool) -> None:
        """Write the product of two operands to ``out``, or add it."""


_tuned: dict[tuple[torch.device, GemmShape], Algorithm] = {}


def use_algorithms(algorithms: Mapping[GemmShape, Algorithm], device: torch.device) -> None:
    """From now on products of these shapes are computed so on a device, and all others by torch."""
    _tuned.clear()
    _tuned.update({(device, shape): algorithm for shape, algorithm in algorithms.items()})


def forward(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """``x W'``."""
    return _gemm("forward", x_NI, weight_OI)


def input_grad(grad_NO: Tensor, weight_OI: Tensor, out: Tensor | None = None) -> Tensor:
    """``grad W``, the gradient of what was multiplied; in ``out``, if given."""
    return _gemm("input", grad_NO, weight_OI, out)


def weight_grad(grad_NO: Tensor, x_NI: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``grad' x``, in float32 or in the precision of both."""
    return _gemm("weight", grad_NO, x_NI, dtype=dtype)


def accumulate_weight_grad(sum_OI: Tensor, grad_NO: Tensor, x_NI: Tensor, first: bool) -> None:
    """The same, added to a float32 sum by the product itself, on GPUs alone; the first begins the sum."""
    _gemm("weight", grad_NO, x_NI, sum_OI, add=not first)


def _gemm(
    kind: Kind,
    left: Tensor,
    right: Tensor,
    out: Tensor | None = None,
    add: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if dtype is None:
        dtype = left.dtype if out is None else out.dtype
    found = _tuned_gemm(kind, left, right, out, add, dtype)
    return torch_gemm(kind, left, right, dtype, out, add) if found is None else found


def torch_gemm(
    kind: Kind, left: Tensor, right: Tensor, dtype: torch.dtype, out: Tensor | None = None, add: bool = False
) -> Tensor:
    """By what torch takes.

    Args:
        kind: One of a linear layer's three products.
        left: As :class:`Shape` names them.
        right: Likewise.
        dtype: Of gradients of weights: that of both, or float32.
        out: Where it goes; float32 has to lie on a GPU for that.
        add: Whether it is added to what is there, in float32.
    """
    if kind != "weight":
        return torch.mm(left, right.T if kind == "forward" else right, out=out)
    if dtype == left.dtype:
        assert not add, "sums are of float32"
        return torch.mm(left.T, right, out=out)
    if out is None:
        return float32_weight_grad(left, right)
    return torch.addmm(out, left.T, right, beta=int(add), out_dtype=out.dtype, out=out)


def _tuned_gemm(
    kind: Kind, left: Tensor, right: Tensor, out: Tensor | None, add: bool, dtype: torch.dtype
) -> Tensor | None:
    """By what was chosen; None where nothing was, or the operands do not lie as it needs them."""
    if not _tuned:
        return None
    shape = GemmShape.of(kind, left, right, dtype)
    algorithm = _tuned.get((left.device, shape))
    if algorithm is None:
        return None
    if out is None:
        out = torch.empty(shape.out, dtype=shape.out_dtype, device=left.device)
    # What is called does not look at what it is given: it reads and writes memory.
    is_tp_replicated = _is_plain_operand(left, shape.left, shape.dtype, left.device)
    is_tp_replicated = is_tp_replicated and _is_plain_operand(right, shape.right, shape.dtype, left.device)
    if not (is_tp_replicated and _is_plain_operand(out, shape.out, shape.out_dtype, left.device)):
        return None
    algorithm(left, right, out, add)
    return out


def _is_plain_operand(x: Tensor, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a tensor is what its place in a product wants, one row behind the other."""
    is_one = (x.shape, x.dtype, x.device) == (shape, dtype, device)
    return is_one and x.is_contiguous() and x.data_ptr() % ALIGNED_BYTES == 0
