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

from meshwright.plan.probed_time import Kind
from meshwright.run.models.cublas import ALIGNED_BYTES, Shape
from meshwright.run.models.products import weight_gradient as torch_weight_gradient


class Algorithm(Protocol):
    """Computes products of one shape."""

    def __call__(self, left: Tensor, right: Tensor, out: Tensor, add: bool) -> None:
        """Write the product of two operands to ``out``, or add it."""


_chosen: dict[Shape, Algorithm] = {}


def choose(algorithms: Mapping[Shape, Algorithm]) -> None:
    """From now on products of these shapes are computed so, and all others by torch."""
    _chosen.clear()
    _chosen.update(algorithms)


def multiply(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """``x W'``."""
    out = _by_choice("forward", x_NI, weight_OI)
    return x_NI @ weight_OI.T if out is None else out


def multiply_back(grad_NO: Tensor, weight_OI: Tensor, out: Tensor | None = None) -> Tensor:
    """``grad W``, the gradient of what was multiplied; in ``out``, if given."""
    found = _by_choice("input", grad_NO, weight_OI, out)
    return torch.mm(grad_NO, weight_OI, out=out) if found is None else found


def weight_gradient(grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    """``grad' x`` in float32."""
    out = _by_choice("weight", grad_NO, x_NI)
    return torch_weight_gradient(grad_NO, x_NI) if out is None else out


def add_weight_gradient(sum_OI: Tensor, grad_NO: Tensor, x_NI: Tensor, first: bool) -> None:
    """The same, added to a float32 sum by the product itself, on GPUs alone; the first begins the sum."""
    if _by_choice("weight", grad_NO, x_NI, sum_OI, add=not first) is None:
        torch.addmm(sum_OI, grad_NO.T, x_NI, beta=0 if first else 1, out_dtype=sum_OI.dtype, out=sum_OI)


def _by_choice(
    kind: Kind, left: Tensor, right: Tensor, out: Tensor | None = None, add: bool = False
) -> Tensor | None:
    """By what was chosen; None where nothing was, or the operands do not lie as it needs them."""
    if not _chosen:
        return None
    shape = Shape.of(kind, left, right)
    algorithm = _chosen.get(shape)
    if algorithm is None:
        return None
    if out is None:
        out = torch.empty(shape.out, dtype=shape.out_dtype, device=left.device)
    if not all(map(_lies_plainly, (left, right, out))):
        return None
    algorithm(left, right, out, add)
    return out


def _lies_plainly(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % ALIGNED_BYTES == 0
