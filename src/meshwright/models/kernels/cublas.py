"""cuBLASLt through its C interface: lists the algorithms that it proposes for a GEMM, and runs one of them.

Torch uses the first proposal. The library does not say which one is fastest on a power-limited GPU;
``gemm_autotune`` measures it. The library is the one that torch has loaded. Only its documented structures
are used. An algorithm is 64 opaque bytes that may be stored and used again with the same library version.

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
"""Number of algorithms to query; the library seldom proposes more."""
ALIGNED_BYTES = 256
"""Alignment that the heuristic assumes for operands."""
ALGORITHM_BYTES = 64
COMPUTE_FLOAT32 = 68
PRECISIONS = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
"""cudaDataType values."""
TRANSPOSE_A, TRANSPOSE_B = 3, 4
"""cublasLtMatmulDescAttributes: whether an operand is transposed."""


class GemmShape(NamedTuple):
    """Shape and dtypes of one of a linear layer's three GEMMs."""

    kind: Kind
    dtype: torch.dtype
    """Dtype of both operands."""
    tokens: int
    inputs: int
    outputs: int
    same_dtype_out: bool = False
    """Whether a weight gradient has the operands' dtype; else it is float32."""

    @classmethod
    def of(cls, kind: Kind, left: Tensor, right: Tensor, out_dtype: torch.dtype) -> GemmShape:
        """Shape of operands in torch's order: (x, weight), (gradient, weight) or (gradient, x)."""
        tokens, outer = left.shape
        if kind == "forward":
            return cls(kind, left.dtype, tokens, outer, right.shape[0])
        same_dtype_out = kind == "weight" and out_dtype == left.dtype
        return cls(kind, left.dtype, tokens, right.shape[1], outer, same_dtype_out)

    @property
    def left(self) -> tuple[int, int]:
        """Shape of the operand with one row per token."""
        return self.tokens, self.inputs if self.kind == "forward" else self.outputs

    @property
    def right(self) -> tuple[int, int]:
        """Shape of the weight, or of the layer's input for a weight gradient."""
        return self.tokens if self.kind == "weight" else self.outputs, self.inputs

    @property
    def out(self) -> tuple[int, int]:
        """Shape of the output."""
        return {
            "forward": (self.tokens, self.outputs),
            "input": (self.tokens, self.inputs),
            "weight": (self.outputs, self.inputs),
        }[self.kind]

    @property
    def out_dtype(self) -> torch.dtype:
        """Dtype of the output."""
        return torch.float32 if self.kind == "weight" and not self.same_dtype_out else self.dtype


class CublasError(RuntimeError):
    """cuBLASLt returned an error status."""


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
    """The library that torch has loaded."""
    try:
        return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")
    except OSError as error:
        rule = f"needs cuBLASLt, which this torch has not loaded: {error}"
        fix = "Leave train.gemm_autotune out"
        raise UserError(
            Problem("train-gemm-autotune", rule, path="train.gemm_autotune", value=True, fix=fix)
        ) from None


def library_version() -> int:
    """Cached algorithms are valid for one version."""
    version = _library().cublasLtGetVersion
    version.restype = c_size_t
    return int(version())


@functools.cache
def _handle(device: int) -> c_void_p:
    """A handle of the current device."""
    handle = c_void_p()
    _check(_library().cublasLtCreate(byref(handle)))
    return handle


def _check(status: int) -> None:
    if status:
        raise CublasError(f"cuBLASLt returned status {status}")


class CublasLtGemm:
    """GEMMs of one shape on the current device."""

    def __init__(self, shape: GemmShape) -> None:
        """Create descriptors. The library is column-major, so it computes ``out' = right' left'``.

        Args:
            shape: With 16-bit operands.
        """
        self._library, self._handle = _library(), _handle(torch.cuda.current_device())
        self._matmul, operand = c_void_p(), PRECISIONS[shape.dtype]
        float32 = PRECISIONS[torch.float32]
        _check(self._library.cublasLtMatmulDescCreate(byref(self._matmul), COMPUTE_FLOAT32, float32))
        for attribute, transposed in (
            (TRANSPOSE_A, shape.kind == "forward"),
            (TRANSPOSE_B, shape.kind == "weight"),
        ):
            value = c_int(transposed)
            _check(
                self._library.cublasLtMatmulDescSetAttribute(
                    self._matmul, attribute, byref(value), c_size_t(ctypes.sizeof(value))
                )
            )
        self._right = self._matrix_layout(operand, shape.right)
        self._left = self._matrix_layout(operand, shape.left)
        self._out = self._matrix_layout(PRECISIONS[shape.out_dtype], shape.out)
        self._one, self._zero = c_float(1.0), c_float(0.0)

    def _matrix_layout(self, precision: int, shape: tuple[int, int]) -> c_void_p:
        """Layout of a contiguous row-major matrix."""
        rows, columns = shape
        layout = c_void_p()
        sizes = c_uint64(columns), c_uint64(rows), c_int64(columns)
        _check(self._library.cublasLtMatrixLayoutCreate(byref(layout), precision, *sizes))
        return layout

    def query_algorithms(self) -> list[bytes]:
        """Algorithms that need no workspace, the library's preferred one first."""
        preference, found, count = c_void_p(), (_Proposal * PROPOSALS)(), c_int()
        _check(self._library.cublasLtMatmulPreferenceCreate(byref(preference)))
        try:
            status = self._library.cublasLtMatmulAlgoGetHeuristic(
                self._handle,
                self._matmul,
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
        if status:  # no algorithm for this shape
            return []
        return [bytes(proposal.algorithm) for proposal in found[: count.value] if not proposal.status]

    def run(self, algorithm: bytes, left: Tensor, right: Tensor, out: Tensor, add: bool = False) -> None:
        """Run the GEMM.

        Args:
            algorithm: One that was proposed for this shape.
            left: As :class:`GemmShape` names them.
            right: Likewise.
            out: Written, or added to.
            add: Whether the result is added to ``out``.
        """
        status = self._library.cublasLtMatmul(
            self._handle,
            self._matmul,
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
