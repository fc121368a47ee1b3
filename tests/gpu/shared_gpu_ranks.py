"""Rank entries for several ranks on one GPU, with gloo or with NCCL."""

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


def _reduce_scatter_on_cpu(output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):  # noqa: A002
    """Gloo copies its input; a copy on the GPU would raise the peak, as NCCL needs none."""
    own = torch.empty(output.shape, dtype=output.dtype)
    _original_reduce_scatter(own, input.cpu(), op=op, group=group)
    output.copy_(own)


_original_reduce_scatter = dist.reduce_scatter_tensor


class _ReceiveThroughCpu:
    """A receive into CPU memory; ``wait`` copies it to the GPU."""

    def __init__(self, target, received, work):
        self._target, self._received, self._work = target, received, work

    def wait(self):
        self._work.wait()
        self._target.copy_(self._received)


class _TransfersThroughCpu:
    """Replaces ``torch.distributed`` in a pipeline: gloo sends only CPU tensors."""

    @staticmethod
    def send(tensor, **where):
        dist.send(tensor.cpu(), **where)

    @staticmethod
    def recv(tensor, **where):
        received = torch.empty(tensor.shape, dtype=tensor.dtype)
        dist.recv(received, **where)
        tensor.copy_(received)

    @staticmethod
    def isend(tensor, **where):
        return dist.isend(tensor.cpu(), **where)

    @staticmethod
    def irecv(tensor, **where):
        received = torch.empty(tensor.shape, dtype=tensor.dtype)
        return _ReceiveThroughCpu(tensor, received, dist.irecv(received, **where))


def run_with_gloo(run_dir, listener):
    """Several ranks on one GPU with gloo; NCCL refuses two ranks of one host on one GPU.

    Gloo's functional collectives read GPU memory from the CPU and crash; ``torch.distributed``'s do not.
    """
    tensor_collectives.all_gather_rows = _all_gather
    tensor_collectives.reduce_scatter_rows = _reduce_scatter
    dist.reduce_scatter_tensor = _reduce_scatter_on_cpu  # FSDP2 calls it
    p2p.dist = _TransfersThroughCpu
    worker.init_mesh = functools.partial(worker.init_mesh, backend="gloo")
    return worker.run_rank(run_dir, listener)


def pose_as_another_host():
    """Each process has another host id, so NCCL accepts several on one GPU."""
    os.environ |= {
        "NCCL_HOSTID": f"process-{os.getpid()}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


def run_with_nccl(run_dir, listener):
    """Several ranks on one GPU with NCCL."""
    pose_as_another_host()
    return worker.run_rank(run_dir, listener)
