"""Replicated data parallelism: torch's DDP, with its buckets fixed before the first step.

Every rank holds the whole model and reads other samples. In the backward pass each bucket of gradients is
summed over ``dp_replicate``: every rank sends its bucket and receives the sum. The loss is already divided
by the global number of target tokens, so the sum is the gradient; DDP's own mean is not used.

No ``from __future__ import annotations`` here: DDP compares a hook's annotations with the classes.
"""

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.parallel.bucket_times import BucketTimes
from meshwright.parallel.mesh import Mesh
from meshwright.spec.job import Job

SYNC_BUFFERS = "broadcast_buffers"
"""Keyword for whether buffers are broadcast in every forward; torch 2.13 has a new name for it."""
if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
    SYNC_BUFFERS = "forward_sync_buffers"


class LocalGradNorm:
    """Squared norm of this rank's own gradients, taken bucket by bucket before they are summed."""

    def __init__(self) -> None:
        self._wanted = False
        self.total: torch.Tensor | float = 0.0

    def begin(self, wanted: bool) -> None:
        """A step begins; only a step that wants the norm pays for it."""
        self._wanted, self.total = wanted, 0.0

    def add_bucket(self, bucket: torch.Tensor) -> None:
        """Add one bucket."""
        if self._wanted:
            self.total = self.total + torch.linalg.vector_norm(bucket).double().square()


class FixedBucketDDP(DistributedDataParallel):
    """DDP whose buckets hold parameters in reverse registration order and never change.

    Uses three private parts of torch: ``_build_params_for_reducer``, and the reducer's
    ``_push_all_rebuilt_params`` and ``_rebuild_buckets``. Tried on 2.11 and 2.13;
    ``tests/multiproc/test_ddp_buckets.py`` fails if a version changes them.
    """

    local_grad_norm: LocalGradNorm
    times: BucketTimes | None = None
    """Told when buckets are ready and reduced, where somebody wants to know."""

    def _build_params_for_reducer(self) -> Any:
        parameters, expect_sparse = super()._build_params_for_reducer()
        return list(reversed(parameters)), list(reversed(expect_sparse))

    def fix_buckets(self) -> None:
        """Rebuild the buckets now, in the order given above; costs two small broadcasts from rank 0."""
        self.reducer._push_all_rebuilt_params()
        rebuilt = self.reducer._rebuild_buckets()
        assert rebuilt, "DDP did not rebuild its buckets; this torch version keeps them elsewhere"


def all_reduce_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket over the replicas, in float32."""
    full = bucket.buffer()
    work = dist.all_reduce(full, group=group, async_op=True)
    return work.get_future().then(lambda _: full)


def compressed_hook(dtype: torch.dtype) -> Callable[..., torch.futures.Future[torch.Tensor]]:
    """Sum a bucket over the replicas in a smaller type: half the bytes, rounded sums."""

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        full = bucket.buffer()
        low = full.to(dtype)
        work = dist.all_reduce(low, group=group, async_op=True)
        return work.get_future().then(lambda _: full.copy_(low))

    return hook


HOOKS = {
    "none": all_reduce_hook,
    "bf16": compressed_hook(torch.bfloat16),
    "fp16": compressed_hook(torch.float16),
}


def instrument_hook(
    hook: Callable[..., torch.futures.Future[torch.Tensor]], replicated: FixedBucketDDP
) -> Callable[..., Any]:
    """The hook, with a look at each bucket before it is sent, and at the clock."""

    def look(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        replicated.local_grad_norm.add_bucket(bucket.buffer())
        times, index = replicated.times, bucket.index()
        if times is None:
            return hook(group, bucket)

        def arrived(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            times.reduced(index)
            return done.value()

        times.ready(index)
        return hook(group, bucket).then(arrived)

    return look


@torch.no_grad()
def average_batch_norm_stats(module: nn.Module, mesh: Mesh) -> None:
    """Running statistics become their mean over the replicas: every rank sends its own and gets the sum.

    So evaluation and checkpoints do not depend on the rank. All travel in one call.
    """
    buffers = list(module.buffers())
    flat = torch.cat([buffer.flatten() for buffer in buffers])
    dist.all_reduce(flat, group=mesh.group("dp_replicate"))
    flat /= mesh.world_size
    for buffer, mean in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))


def apply_ddp(module: nn.Module, job: Job, mesh: Mesh, axis: str) -> FixedBucketDDP:
    """Wrap a module whose weights are already equal on all ranks of the axis: nothing is broadcast."""
    group = mesh.group(axis)
    replicated = FixedBucketDDP(
        module,
        process_group=group,
        bucket_cap_mb=job.layout.bucket_mb,
        gradient_as_bucket_view=True,
        init_sync=False,
        **cast(Any, {SYNC_BUFFERS: False}),
    )
    replicated.local_grad_norm = LocalGradNorm()
    replicated.register_comm_hook(group, instrument_hook(HOOKS[job.compression.kind], replicated))
    replicated.fix_buckets()
    return replicated
