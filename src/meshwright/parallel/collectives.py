"""Functional collectives on local tensors, by the name of the process group.

torch.compile, fake tensors and autograd functions can trace them. Every rank of the group must call them in
the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_functional = torch.ops._c10d_functional

all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""``(output, input, group=...)``: every rank sends its input and gets all inputs. Renamed in torch 2.13."""

reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""``(output, input, group=...)``: every rank sends its input and gets the sum of its part. Renamed, too."""


def all_reduce(x: Tensor, group: str, operation: str = "sum") -> Tensor:
    """Every rank sends its tensor. Every rank gets the sum (or the maximum)."""
    return _functional.wait_tensor(_functional.all_reduce(x.contiguous(), operation, group))


def all_gather_rows(x: Tensor, size: int, group: str) -> Tensor:
    """Every rank sends its rows. Every rank gets the rows of all ranks, in rank order."""
    return _functional.wait_tensor(_functional.all_gather_into_tensor(x.contiguous(), size, group))


def reduce_scatter_rows(x: Tensor, size: int, group: str) -> Tensor:
    """Every rank sends all rows. Rank r gets the sum of the r-th part of the rows."""
    return _functional.wait_tensor(_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, group))


def all_to_all(parts: Tensor, group: str) -> Tensor:
    """Rank r sends ``parts[s]`` to rank s. It gets ``parts[r]`` of every rank s, in rank order."""
    return all_to_all_rows(parts, [1] * len(parts), [1] * len(parts), group)


def all_to_all_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> Tensor:
    """Every rank sends ``sent[s]`` consecutive rows to rank s and gets ``received[s]`` rows from it."""
    return _functional.wait_tensor(_functional.all_to_all_single(rows.contiguous(), received, sent, group))
