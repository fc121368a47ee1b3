"""Modes under which the runtime runs on fake tensors: shapes and dtypes without data.

Integers stay real. There are few, and the code reads them: the order of DDP's buckets, the coordinates of a
mesh, the number of targets, the tokens of an expert. Every other value read from a tensor is zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from meshwright.measure.collective_counter import DEVICE_KEYS
from meshwright.parallel.full_tensors import is_sharded

_READ = torch.ops.aten._local_scalar_dense.default
"""The operators behind ``item``, ``tolist`` and ``float``."""
_ARANGE = torch.ops.aten.arange
"""Its result has integers if its arguments do and no dtype is given."""


class RealIntegers(TorchDispatchMode):
    """On top of the fake mode: computes integers for real, and really calls collectives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation for real if it has no fake input."""
        kwargs = kwargs or {}
        if FakeTensor in types:
            if func is _READ:
                return 0.0 if args[0].is_floating_point() else 0
            if func.namespace in ("_c10d_functional", "meshwright"):
                # Their fake kernels only allocate the result; the CPU kernels call the process group.
                return func.redispatch(DEVICE_KEYS["cpu"], *args, **kwargs)
            return func(*args, **kwargs)
        dtype = kwargs.get("dtype")
        has_tensor = any(isinstance(leaf, Tensor) for leaf in tree_iter((args, kwargs)))
        is_range = dtype is None and func.overloadpacket is _ARANGE and all(type(a) is int for a in args)
        if has_tensor or is_range or (dtype is not None and not dtype.is_floating_point):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def keep_fsdp_shards(model: nn.Module) -> None:
    """Keep FSDP2 from padding uneven shards again in its first forward pass.

    It compares addresses to see whether a shard was replaced since ``fully_shard``. Fake tensors have no
    address, so it would allocate every padded shard a second time, as no real rank does. Uses private
    attributes (torch 2.11, 2.13).
    """
    for module in model.modules():
        if is_sharded(module) and (group := module._get_fsdp_state()._fsdp_param_group):
            group._reset_sharded_params = True


class SharedChunks(TorchFunctionMode):
    """Makes ``torch.chunk`` return one fake tensor for all chunks of one shape.

    FSDP2 chunks a parameter for all ranks and keeps one chunk. Fake chunks cannot differ, and a view of a
    fake tensor takes a tenth of a millisecond: 512 ranks of a 70B model took most of a minute.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace ``torch.chunk`` of fake tensors."""
        kwargs = kwargs or {}
        if func is torch.chunk and isinstance(args[0], FakeTensor):  # while FSDP2 wraps: no autograd yet
            return _chunk_once(*args, **kwargs)
        return func(*args, **kwargs)


def _chunk_once(tensor: Tensor, chunks: int, dim: int = 0) -> list[Tensor]:
    rows = tensor.size(dim)
    size = -(-rows // chunks)
    full, rest = divmod(rows, size)
    tail = [tensor.narrow(dim, full * size, rest)] if rest else []
    return [tensor.narrow(dim, 0, size)] * full + tail
