"""16-bit GEMMs of linear layers: by an autotuned algorithm where the shape has one, else by torch.

``gemm_autotune`` finds the algorithms. CPUs have none.

Shape suffixes: N tokens, I and O inputs and outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from meshwright.layout.gemms import Kind
from meshwright.models.kernels.cublas import ALIGNED_BYTES, GemmShape


class Algorithm(Protocol):
    """Computes GEMMs of one shape."""

    def __call__(self, left: Tensor, right: Tensor, out: Tensor, add: bool) -> None:
        """Write the matmul of two operands to ``out``, or add it."""


class Gemms:
    """The forward, input-gradient and weight-gradient GEMMs of linear layers."""

    def __init__(
        self, algorithms: Mapping[GemmShape, Algorithm] | None = None, device: torch.device | None = None
    ) -> None:
        """Use algorithms for their shapes, and torch for all others.

        Args:
            algorithms: Found by autotuning on a device.
            device: That device.
        """
        self._algorithms, self._device = dict(algorithms or {}), device

    def forward(self, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        """``x W'``."""
        return self._run("forward", x_NI, weight_OI)

    def input_grad(self, grad_NO: Tensor, weight_OI: Tensor, out: Tensor | None = None) -> Tensor:
        """``grad W``; written to ``out``, if given."""
        return self._run("input", grad_NO, weight_OI, out)

    def weight_grad(self, grad_NO: Tensor, x_NI: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """``grad' x``, in float32 or in the operands' dtype."""
        return self._run("weight", grad_NO, x_NI, dtype=dtype)

    def accumulate_weight_grad(self, sum_OI: Tensor, grad_NO: Tensor, x_NI: Tensor, first: bool) -> None:
        """Add ``grad' x`` to a float32 sum inside the GEMM, on GPUs only; the first one overwrites it."""
        self._run("weight", grad_NO, x_NI, sum_OI, add=not first)

    def _run(
        self,
        kind: Kind,
        left: Tensor,
        right: Tensor,
        out: Tensor | None = None,
        add: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        if dtype is None:
            dtype = left.dtype if out is None else out.dtype
        tuned = self._run_tuned(kind, left, right, out, add, dtype) if self._algorithms else None
        return torch_gemm(kind, left, right, dtype, out, add) if tuned is None else tuned

    def _run_tuned(
        self, kind: Kind, left: Tensor, right: Tensor, out: Tensor | None, add: bool, dtype: torch.dtype
    ) -> Tensor | None:
        """By the autotuned algorithm; None without one, or if the operands' layout does not fit it."""
        shape = GemmShape.of(kind, left, right, dtype)
        algorithm = self._algorithms.get(shape)
        if algorithm is None or left.device != self._device:
            return None
        if out is None:
            out = torch.empty(shape.out, dtype=shape.out_dtype, device=left.device)
        # The algorithm reads and writes raw memory: it checks nothing itself.
        fits = _is_plain_operand(left, shape.left, shape.dtype, left.device)
        fits = fits and _is_plain_operand(right, shape.right, shape.dtype, left.device)
        if not (fits and _is_plain_operand(out, shape.out, shape.out_dtype, left.device)):
            return None
        algorithm(left, right, out, add)
        return out


TORCH_GEMMS = Gemms()
"""All GEMMs by torch."""


def torch_gemm(
    kind: Kind, left: Tensor, right: Tensor, dtype: torch.dtype, out: Tensor | None = None, add: bool = False
) -> Tensor:
    """A GEMM by torch's choice of algorithm.

    Args:
        kind: Which of a linear layer's three GEMMs.
        left: As :class:`GemmShape` names them.
        right: Likewise.
        dtype: Dtype of a weight gradient: the operands' dtype, or float32.
        out: Where the result goes; float32 needs a GPU for that.
        add: Whether it is added to ``out``, in float32.
    """
    if kind != "weight":
        return torch.mm(left, right.T if kind == "forward" else right, out=out)
    if dtype == left.dtype:
        assert not add, "only float32 sums are accumulated"
        return torch.mm(left.T, right, out=out)
    if out is None:
        return float32_weight_grad(left, right)
    return torch.addmm(out, left.T, right, beta=int(add), out_dtype=out.dtype, out=out)


def float32_weight_grad(grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    """``grad' x``, (O, I), in float32: accumulated in it on every device; GPUs never round to 16 bits."""
    if grad_NO.is_cuda:
        return torch.mm(grad_NO.T, x_NI, out_dtype=torch.float32)
    return torch.mm(grad_NO.T, x_NI).float()


def _is_plain_operand(x: Tensor, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a tensor has the shape, dtype and device of an operand, and is contiguous and aligned."""
    matches = (x.shape, x.dtype, x.device) == (shape, dtype, device)
    return matches and x.is_contiguous() and x.data_ptr() % ALIGNED_BYTES == 0
