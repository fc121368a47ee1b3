"""Comparison of full tensors by the parameter names of the one-process model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshwright.parallel.full_tensors import canonical_name, full_tensor, is_dtensor
from meshwright.verify.prove import compare_tensors


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("blocks.0.attention.wq.weight", "blocks.0.attention.wq.weight"),
        ("module.blocks.0._orig_mod.ffn.up.weight", "blocks.0.ffn.up.weight"),
        ("blocks.1._checkpoint_wrapped_module.norm.weight", "blocks.1.norm.weight"),
        ("", ""),
        ("_orig_mod", ""),
    ],
)
def test_parameter_names_lose_wrapper_prefixes(wrapped, plain):
    assert canonical_name(wrapped) == plain


def test_plain_tensor_is_returned_and_a_sharded_one_is_gathered():
    tensor = torch.arange(6.0, requires_grad=True)
    assert full_tensor(tensor).data_ptr() == tensor.data_ptr()
    assert not full_tensor(tensor).requires_grad
    assert not is_dtensor(tensor)
    assert not is_dtensor(None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(tensor.detach(), mesh, [Shard(0)])
        assert is_dtensor(sharded)
        whole = full_tensor(sharded)
    finally:
        dist.destroy_process_group()
    assert not isinstance(whole, DTensor)
    assert torch.equal(whole, tensor.detach())


def test_comparison_has_norm_and_factor():
    expected = torch.tensor([3.0, 4.0])
    same = compare_tensors(expected.clone(), expected)
    assert same.difference == 0
    double = compare_tensors(2 * expected, expected)
    assert (double.difference, double.factor) == (5.0, 2.0)
    assert double.rest == pytest.approx(0)
    perpendicular = compare_tensors(torch.tensor([4.0, -3.0]), expected)
    assert perpendicular.factor == pytest.approx(0)
    assert perpendicular.rest == pytest.approx(1)


@pytest.mark.parametrize("found", [torch.zeros(3), torch.tensor([1.0, float("nan")])])
def test_other_shape_or_nan_has_no_numeric_difference(found):
    assert compare_tensors(found, torch.ones(2)).difference is None
