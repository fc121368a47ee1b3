"""The control all-reduce of one process."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.parallel.mesh import Mesh

ALONE = Mesh(0, 1, torch.device("cpu"))


def test_local_values_come_last_and_are_not_summed():
    """They may have any dtype and have no gradient. NaN stays NaN."""
    norm = torch.tensor(2.5, dtype=torch.bfloat16, requires_grad=True)
    values = [1, torch.tensor(0.5), torch.tensor(4, dtype=torch.int64)]
    assert ALONE.all_reduce_scalars(values) == [1.0, 0.5, 4.0]
    assert ALONE.all_reduce_scalars(values, local_values=[norm, torch.tensor([7.0])]) == [
        1.0,
        0.5,
        4.0,
        2.5,
        7.0,
    ]
    *_, last = ALONE.all_reduce_scalars(values, local_values=[torch.tensor(float("nan"))])
    assert math.isnan(last)


def test_sums_and_local_values_are_copied_to_the_cpu_together(monkeypatch):
    """Every copy would synchronize the device, so there is one tensor."""
    read, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: read.append(tensor) or tolist(tensor))
    for name in ("item", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, lambda tensor: pytest.fail("another one was read"))
    assert ALONE.all_reduce_scalars([1.0, torch.tensor(2.0)], local_values=[torch.tensor(3.0)]) == [
        1.0,
        2.0,
        3.0,
    ]
    assert len(read) == 1
