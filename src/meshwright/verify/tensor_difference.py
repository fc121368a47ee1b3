"""Norms and differences of full tensors, as a proof reports them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.verify.proof_task import TensorDifference

EXPLAINED = 1e-6
"""Relative differences below are rounding: no factor explains them."""


def compare_tensors(found: Tensor, expected: Tensor) -> TensorDifference:
    """The norm of the difference, and how well one factor explains it."""
    if found.shape != expected.shape:
        return TensorDifference(None)
    near = found.detach().cpu()
    difference = tensor_norm(near - expected)
    if not math.isfinite(difference):
        return TensorDifference(None)
    norm = tensor_norm(expected)
    if difference <= EXPLAINED * norm or not norm:
        return TensorDifference(difference)
    one, other, square = near.double(), expected.double(), norm**2
    factor = float((one * other).sum()) / square
    rest = tensor_norm(one - factor * other) / math.sqrt(square)
    return TensorDifference(difference, factor, rest, note=describe_rows(one, other))


def describe_rows(found: Tensor, expected: Tensor) -> str:
    """Describe the rows that differ; empty if all do."""
    rows = (
        (found != expected).reshape(len(found), -1).any(1).nonzero().flatten().tolist() if found.ndim else []
    )
    if not rows or len(rows) == len(found):
        return ""
    return f"row {rows[0]}" if len(rows) == 1 else f"{len(rows)} of {len(found)} rows, the first is {rows[0]}"


def tensor_norm(tensor: Tensor) -> float:
    """The norm, computed in float64."""
    if tensor.is_floating_point():
        return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
    return float(torch.linalg.vector_norm(tensor.double()))
