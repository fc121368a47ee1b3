"""Entries for ranks on GPUs that do something otherwise on purpose."""

from __future__ import annotations

import functools

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from meshwright.run import worker
from meshwright.run.parallel import split


def _all_gather(x, size, group):
    whole = x.new_empty(size * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=_resolve_process_group(group))
    return whole


def _reduce_scatter(x, size, group):
    own = x.new_empty(len(x) // size, *x.shape[1:])
    dist.reduce_scatter_tensor(own, x.contiguous(), group=_resolve_process_group(group))
    return own


def through_gloo(run_dir, listener):
    """Ranks that may share a device: gloo carries what NCCL would refuse to.

    Its functional collectives read a GPU's memory from the host, and die of it; the plain ones do not.
    """
    split._all_gather, split._reduce_scatter = _all_gather, _reduce_scatter
    worker.join_ranks = functools.partial(worker.join_ranks, backend="gloo")
    return worker.run_rank(run_dir, listener)
