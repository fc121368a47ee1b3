"""Entries for ranks on GPUs that do something otherwise on purpose."""

from __future__ import annotations

import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from meshwright.parallel import tensor_collectives
from meshwright.parallel.pipeline import p2p
from meshwright.train import worker


def _all_gather(x, size, group):
    whole = x.new_empty(size * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=_resolve_process_group(group))
    return whole


def _reduce_scatter(x, size, group):
    own = x.new_empty(len(x) // size, *x.shape[1:])
    dist.reduce_scatter_tensor(own, x.contiguous(), group=_resolve_process_group(group))
    return own


def _reduce_scatter_on_host(output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):  # noqa: A002
    """Gloo copies what it reduces, on the device if it is there: memory that NCCL does not take."""
    own = torch.empty(output.shape, dtype=output.dtype)
    _plain_reduce_scatter(own, input.cpu(), op=op, group=group)
    output.copy_(own)


_plain_reduce_scatter = dist.reduce_scatter_tensor


class _Arriving:
    """A receive on the host, which the device gets when it is waited for."""

    def __init__(self, target, host, work):
        self._target, self._host, self._work = target, host, work

    def wait(self):
        self._work.wait()
        self._target.copy_(self._host)


class _HostTransfers:
    """In place of ``torch.distributed`` for a pipeline: gloo sends CPU tensors alone."""

    @staticmethod
    def send(tensor, **where):
        dist.send(tensor.cpu(), **where)

    @staticmethod
    def recv(tensor, **where):
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        dist.recv(host, **where)
        tensor.copy_(host)

    @staticmethod
    def isend(tensor, **where):
        return dist.isend(tensor.cpu(), **where)

    @staticmethod
    def irecv(tensor, **where):
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        return _Arriving(tensor, host, dist.irecv(host, **where))


def through_gloo(run_dir, listener):
    """Ranks that may share a device: gloo carries what NCCL would refuse to.

    Its functional collectives read a GPU's memory from the host, and die of it; the plain ones do not.
    """
    tensor_collectives.all_gather_rows = _all_gather
    tensor_collectives.reduce_scatter_rows = _reduce_scatter
    dist.reduce_scatter_tensor = _reduce_scatter_on_host  # as FSDP2 calls it
    p2p.dist = _HostTransfers
    worker.init_mesh = functools.partial(worker.init_mesh, backend="gloo")
    return worker.run_rank(run_dir, listener)


def through_nccl(run_dir, listener):
    """Ranks that share a device, and are on different machines for all that NCCL knows."""
    os.environ |= {
        "NCCL_HOSTID": f"rank-{os.environ['RANK']}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }
    return worker.run_rank(run_dir, listener)
