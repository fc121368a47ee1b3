"""Element-wise reductions in rank order: the result has the same bits on every rank and in every run.

16-bit floating-point numbers are added in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
SUM, AVG, PRODUCT, MIN, MAX = range(5)
"""Numbers of ``ReduceOp`` in torch."""
UFUNCS: dict[int, Callable[..., Any]] = {
    SUM: np.add,
    AVG: np.add,
    PRODUCT: np.multiply,
    MIN: np.minimum,
    MAX: np.maximum,
}
NUMPY_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
}
"""Dtypes that numpy reduces."""
HALF_DTYPES = (torch.bfloat16, torch.float16)
Reduce = Callable[[Array, Sequence[Array] | Array], None]
"""Writes the reduction of arrays, in their order, to the first argument, which may be one of them. All are
arrays of bytes."""


def can_reduce(dtype: torch.dtype, op: int) -> bool:
    """Whether tensors of a dtype can be reduced by an operation."""
    if dtype in HALF_DTYPES:
        return op in (SUM, AVG)
    return dtype in NUMPY_DTYPES and op in UFUNCS and (op != AVG or dtype.is_floating_point)


def build_reduce(dtype: torch.dtype, op: int) -> Reduce:
    """The reduction of a dtype."""
    return _build_half_sum(dtype, op) if dtype in HALF_DTYPES else _build_ufunc(dtype, op)


def _build_ufunc(dtype: torch.dtype, op: int) -> Reduce:
    numpy_dtype, ufunc = NUMPY_DTYPES[dtype], UFUNCS[op]

    def reduce(out: Array, parts: Sequence[Array] | Array) -> None:
        result = out.view(numpy_dtype)
        later = [part.copy() if np.may_share_memory(part, out) else part for part in parts[2:]]
        ufunc(parts[0].view(numpy_dtype), parts[1].view(numpy_dtype), out=result)
        for part in later:
            ufunc(result, part.view(numpy_dtype), out=result)
        if op == AVG:
            np.divide(result, len(parts), out=result)

    return reduce


def _build_half_sum(dtype: torch.dtype, op: int) -> Reduce:
    def to_tensor(part: Array) -> torch.Tensor:
        return torch.from_numpy(part).view(dtype)

    def reduce(out: Array, parts: Sequence[Array] | Array) -> None:
        result = to_tensor(out)
        if len(parts) == 2 and op == SUM:  # rounded once
            torch.add(to_tensor(parts[0]), to_tensor(parts[1]), out=result)
            return
        total = to_tensor(parts[0]).float()
        for part in parts[1:]:
            total += to_tensor(part)
        if op == AVG:
            total /= len(parts)
        result.copy_(total)

    return reduce
