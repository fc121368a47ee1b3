"""cuBLASLt, asked directly: every algorithm that it proposes for a product, and the product by one of them.

Torch takes the first proposal. Which one is the fastest on a GPU at the limit of its power, the library does
not say; ``run.race`` finds out. The library is the one that torch has loaded, called through its C interface;
of its structures only those are known here that its documentation lays open. An algorithm is 64 bytes that
may be kept and used again with the same version of the library.

Shape suffixes: N tokens, I and O inputs and outputs of a linear layer.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.core.errors import Problem, UserError
from meshwright.layout.gemms import Kind

PROPOSALS = 8
"""How many are asked for; a library has seldom more."""
ALIGNED_BYTES = 256
"""How operands lie for what is proposed."""
ALGORITHM_BYTES = 64
COMPUTE_FLOAT32 = 68
PRECISIONS = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
"""The library's names of them."""
TRANSPOSE_A, TRANSPOSE_B = 3, 4
"""Attributes of a product: whether an operand is transposed."""


class GemmShape(NamedTuple):
    """One of a linear layer's three products."""

    kind: Kind
    dtype: torch.dtype
    """Of both operands."""
    tokens: int
    inputs: int
    outputs: int
    same_dtype_out: bool = False
    """Whether the gradient of a weight is as its operands are; else it is float32."""

    @classmethod
    def of(cls, kind: Kind, left: Tensor, right: Tensor, out_dtype: torch.dtype) -> GemmShape:
        """Of operands in torch's order: (x, weight), (gradient, weight) or (gradient, x)."""
        tokens, outer = left.shape
        if kind == "forward":
            return cls(kind, left.dtype, tokens, outer, right.shape[0])
        same_dtype_out = kind == "weight" and out_dtype == left.dtype
        return cls(kind, left.dtype, tokens, right.shape[1], outer, same_dtype_out)

    @property
    def left(self) -> tuple[int, int]:
        """What has a row for each token."""
        return self.tokens, self.inputs if self.kind == "forward" else self.outputs

    @property
    def right(self) -> tuple[int, int]:
        """The weight, or what it read."""
        return self.tokens if self.kind == "weight" else self.outputs, self.inputs

    @property
    def out(self) -> tuple[int, int]:
        """What comes out."""
        return {
            "forward": (self.tokens, self.outputs),
            "input": (self.tokens, self.inputs),
            "weight": (self.outputs, self.inputs),
        }[self.kind]

    @property
    def out_dtype(self) -> torch.dtype:
        """Of what comes out."""
        return torch.float32 if self.kind == "weight" and not self.same_dtype_out else self.dtype


class CublasError(RuntimeError):
    """The library has refused."""


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * (ALGORITHM_BYTES // 8)),)


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    """The one that torch has loaded."""
    try:
        return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")
    except OSError as error:
        rule = f"needs cuBLASLt, which this torch has not loaded: {error}"
        fix = "Leave train.gemm_autotune out"
        raise UserError(
            Problem("train-gemm-autotune", rule, path="train.gemm_autotune", value=True, fix=fix)
        ) from None


def library_version() -> int:
    """For which algorithms may be kept."""
    version = _library().cublasLtGetVersion
    version.restype = c_size_t
    return int(version())


@functools.cache
def _handle(device: int) -> c_void_p:
    """Of a device, which is the current one."""
    handle = c_void_p()
    _check(_library().cublasLtCreate(byref(handle)))
    return handle


def _check(status: int) -> None:
    if status:
        raise CublasError(f"cuBLASLt says {status}")


class CublasLtGemm:
    """The products of one shape on the current device."""

    def __init__(self, shape: GemmShape) -> None:
        """Describe it to the library, for which rows are columns: it computes ``out' = right' left'``.

        Args:
            shape: With operands of 16 bits.
        """
        self._library, self._handle = _library(), _handle(torch.cuda.current_device())
        self._product, operand = c_void_p(), PRECISIONS[shape.dtype]
        float32 = PRECISIONS[torch.float32]
        _check(self._library.cublasLtMatmulDescCreate(byref(self._product), COMPUTE_FLOAT32, float32))
        for attribute, transposed in (
            (TRANSPOSE_A, shape.kind == "forward"),
            (TRANSPOSE_B, shape.kind == "weight"),
        ):
            value = c_int(transposed)
            _check(
                self._library.cublasLtMatmulDescSetAttribute(
                    self._product, attribute, byref(value), c_size_t(ctypes.sizeof(value))
                )
            )
        self._right, self._left = (
            self._matrix_layout(operand, shape.right),
            self._matrix_layout(operand, shape.left),
        )
        self._out = self._matrix_layout(PRECISIONS[shape.out_dtype], shape.out)
        self._one, self._zero = c_float(1.0), c_float(0.0)

    def _matrix_layout(self, precision: int, shape: tuple[int, int]) -> c_void_p:
        """A matrix whose rows lie one behind the other."""
        rows, columns = shape
        layout = c_void_p()
        sizes = c_uint64(columns), c_uint64(rows), c_int64(columns)
        _check(self._library.cublasLtMatrixLayoutCreate(byref(layout), precision, *sizes))
        return layout

    def query_algorithms(self) -> list[bytes]:
        """Algorithms that need no memory of their own, the one that the library likes best first."""
        preference, found, count = c_void_p(), (_Proposal * PROPOSALS)(), c_int()
        _check(self._library.cublasLtMatmulPreferenceCreate(byref(preference)))
        try:
            status = self._library.cublasLtMatmulAlgoGetHeuristic(
                self._handle,
                self._product,
                self._right,
                self._left,
                self._out,
                self._out,
                preference,
                PROPOSALS,
                found,
                byref(count),
            )
        finally:
            _check(self._library.cublasLtMatmulPreferenceDestroy(preference))
        if status:  # it has none for such a shape
            return []
        return [bytes(proposal.algorithm) for proposal in found[: count.value] if not proposal.status]

    def run(self, algorithm: bytes, left: Tensor, right: Tensor, out: Tensor, add: bool = False) -> None:
        """Multiply, or add the product to what is there.

        Args:
            algorithm: One that was proposed for this shape.
            left: As :class:`Shape` names them.
            right: Likewise.
            out: Where the product goes.
            add: Whether it is added.
        """
        status = self._library.cublasLtMatmul(
            self._handle,
            self._product,
            byref(self._one),
            c_void_p(right.data_ptr()),
            self._right,
            c_void_p(left.data_ptr()),
            self._left,
            byref(self._one if add else self._zero),
            c_void_p(out.data_ptr()),
            self._out,
            c_void_p(out.data_ptr()),
            self._out,
            algorithm,
            None,
            c_size_t(0),
            c_void_p(torch.cuda.current_stream(out.device).cuda_stream),
        )
        _check(status)
