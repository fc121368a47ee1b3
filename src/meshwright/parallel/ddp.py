"""Data parallel (DDP): torch's DistributedDataParallel with buckets that are fixed before the first step.

Every rank holds the whole model and reads its own samples. In the backward pass each bucket of gradients is
all-reduced over ``dp_replicate``: every rank sends its bucket and gets the sum. The loss is already divided
by the global number of target tokens, so the sum is the gradient. DDP's mean is not used.

No ``from __future__ import annotations`` here: DDP compares a hook's annotations with the classes.
"""

import inspect
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.layout.hierarchy import bucket_sizes, find_hierarchy
from meshwright.parallel.bucket_times import BucketTimes
from meshwright.parallel.hierarchical_all_reduce import HierarchicalAllReduce
from meshwright.parallel.mesh import Mesh
from meshwright.spec.job import Job

Hook = Callable[[dist.ProcessGroup, dist.GradBucket], torch.futures.Future[torch.Tensor]]

SYNC_BUFFERS = "broadcast_buffers"
"""Keyword that turns off the broadcast of buffers in every forward pass. Renamed in torch 2.13."""
if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
    SYNC_BUFFERS = "forward_sync_buffers"


class LocalGradNorm:
    """Squared norm of this rank's gradient, bucket by bucket, before the all-reduce."""

    def __init__(self) -> None:
        self._is_enabled = False
        self.total: torch.Tensor | float = 0.0

    def begin(self, enabled: bool) -> None:
        """Start a step. The norm is computed only where ``enabled``."""
        self._is_enabled, self.total = enabled, 0.0

    def add_bucket(self, bucket: torch.Tensor) -> None:
        """Add the squared norm of one bucket."""
        if self._is_enabled:
            self.total = self.total + torch.linalg.vector_norm(bucket).double().square()


class FixedBucketDDP(DistributedDataParallel):
    """DDP whose buckets hold parameters in reverse registration order and never change.

    Uses three private parts of torch: ``_build_params_for_reducer``, and the reducer's
    ``_push_all_rebuilt_params`` and ``_rebuild_buckets``. Tried on 2.11 and 2.13.
    ``tests/multiproc/test_ddp_buckets.py`` fails if a version changes them.
    """

    local_grad_norm: LocalGradNorm
    buffers_of_hook: tuple[torch.Tensor, ...] = ()
    """Live from step to step."""
    _bucket_times: BucketTimes | None = None

    def _build_params_for_reducer(self) -> Any:
        parameters, expect_sparse = super()._build_params_for_reducer()
        return list(reversed(parameters)), list(reversed(expect_sparse))

    def record_bucket_times(self, times: BucketTimes) -> None:
        """Record when buckets are ready and reduced, for a benchmark."""
        self._bucket_times = times

    def fix_buckets(self) -> None:
        """Rebuild the buckets now, in reverse registration order. Costs two small broadcasts from rank 0."""
        self.reducer._push_all_rebuilt_params()
        rebuilt = self.reducer._rebuild_buckets()
        assert rebuilt, "DDP did not rebuild its buckets; this torch version keeps them elsewhere"


def all_reduce_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """All-reduce a bucket in float32: every rank sends its bucket and gets the sum."""
    full = bucket.buffer()
    work = dist.all_reduce(full, group=group, async_op=True)
    return work.get_future().then(lambda _: full)


def build_compressed_hook(dtype: torch.dtype) -> Hook:
    """A hook that all-reduces a bucket in a 16-bit dtype: half the bytes, rounded sums."""

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        full = bucket.buffer()
        low = full.to(dtype)
        work = dist.all_reduce(low, group=group, async_op=True)
        return work.get_future().then(lambda _: full.copy_(low))

    return hook


def build_hierarchical_hook(all_reduce: HierarchicalAllReduce) -> Hook:
    """A hook that all-reduces a bucket in phases: inside the nodes, between them, inside them."""

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return all_reduce.start(bucket.buffer())

    return hook


HOOKS: dict[str, Hook] = {
    "none": all_reduce_hook,
    "bf16": build_compressed_hook(torch.bfloat16),
    "fp16": build_compressed_hook(torch.float16),
}


def instrument_hook(hook: Hook, ddp: FixedBucketDDP) -> Hook:
    """A hook that also adds up the local gradient norm and records times.

    It holds the model by a weak reference: the garbage collector does not see that the reducer keeps the
    hook.
    """
    owner = weakref.ref(ddp)

    def instrumented(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        ddp = owner()
        assert ddp is not None, "its reducer calls this hook"
        ddp.local_grad_norm.add_bucket(bucket.buffer())
        times, index = ddp._bucket_times, bucket.index()
        if times is None:
            return hook(group, bucket)

        def record_reduced(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            times.reduced(index)
            return done.value()

        times.ready(index)
        return hook(group, bucket).then(record_reduced)

    return instrumented


def apply_ddp(module: nn.Module, job: Job, mesh: Mesh, axis: str) -> FixedBucketDDP:
    """Wrap a module whose weights are already equal on all ranks of the axis. Nothing is broadcast."""
    group = mesh.group(axis)
    ddp = FixedBucketDDP(
        module,
        process_group=group,
        bucket_cap_mb=job.layout.bucket_mb,
        gradient_as_bucket_view=True,
        init_sync=False,
        **cast(Any, {SYNC_BUFFERS: False}),
    )
    ddp.local_grad_norm = LocalGradNorm()
    hook, hierarchy = HOOKS[job.compression.kind], find_hierarchy(job)
    if hierarchy is not None:
        all_reduce = HierarchicalAllReduce(mesh, hierarchy, bucket_sizes(job))
        hook, ddp.buffers_of_hook = build_hierarchical_hook(all_reduce), all_reduce.buffers
        weakref.finalize(ddp, all_reduce.close).atexit = False
    ddp.register_comm_hook(group, instrument_hook(hook, ddp))
    ddp.fix_buckets()
    return ddp


@torch.no_grad()
def sync_batch_norm_stats(module: nn.Module, job: Job, mesh: Mesh) -> None:
    """Average the running statistics of batch norms over the replicas, after a step, in one all-reduce.

    Every rank sends its statistics and gets the sum. Evaluation and checkpoints then do not depend on the
    rank. Models without batch norm have nothing to average.
    """
    if not job.mixes_samples or job.layout.dp_replicate == 1:
        return
    buffers = list(module.buffers())
    flat = torch.cat([buffer.flatten() for buffer in buffers])
    dist.all_reduce(flat, group=mesh.group("dp_replicate"))
    flat /= mesh.world_size
    for buffer, mean in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))
