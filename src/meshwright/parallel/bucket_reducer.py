"""All-reduces gradients in buckets where torch's DDP cannot.

DDP expects a forward pass, its backward pass, then the next forward pass. With several pipeline stages on a
rank, or a split backward pass, it fails in the second step. It also reduces all parameters over one group,
and experts have another group than the dense parameters. Here the caller says which backward pass is the
last one of the step.

Gradients are views of flat buckets (``layout.ddp_buckets``) from the start. A bucket is all-reduced when the
last of its gradients is complete: every rank sends its bucket and gets the sum.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.layout.axes import gradient_axis
from meshwright.models.dtypes import AUTOCAST_DTYPES
from meshwright.parallel.mesh import Mesh
from meshwright.spec.job import Job

Buckets = Sequence[tuple[Sequence[str], dist.ProcessGroup]]
"""The parameter names of each bucket and the group that reduces it. A name appears once."""


def find_bucket_groups(job: Job, mesh: Mesh, buckets: Sequence[Sequence[str]]) -> Buckets:
    """The group that reduces each bucket. Buckets that are on no other rank are left out."""
    axes = [gradient_axis(job, names[0]) for names in buckets]
    return [(n, mesh.group(axis.name)) for n, axis in zip(buckets, axes, strict=True) if axis.size > 1]


class _Bucket:
    """Gradients that one all-reduce sums."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.group = group
        self.flat = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
        self.size = self.missing = len(parameters)
        self.comm_buffer: Tensor | None = None
        self.work: dist.Work | None = None
        views = self.flat.split([p.numel() for p in parameters])
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view.view_as(parameter)


class BucketReducer:
    """The gradient buckets of a model or of one pipeline stage."""

    def __init__(
        self,
        module: nn.Module,
        buckets: Buckets,
        compression: str,
        deferred: Collection[nn.Parameter] = (),
    ) -> None:
        """Make the gradients views of the buckets.

        Args:
            module: The model or the stage.
            buckets: The parameters to reduce.
            compression: ``compression.kind``: the dtype on the wire.
            deferred: Parameters whose gradients a split backward pass computes later. The caller marks them
                ready.
        """
        named = dict(module.named_parameters())
        self._comm_dtype = AUTOCAST_DTYPES.get(compression)
        self._buckets = [_Bucket([named[name] for name in names], group) for names, group in buckets]
        pairs = zip(self._buckets, buckets, strict=True)
        self._bucket_of = {named[name]: bucket for bucket, (names, _) in pairs for name in names}
        self._is_last_backward = False
        for parameter in self._bucket_of.keys() - set(deferred):
            parameter.register_post_accumulate_grad_hook(self._after_accumulate)

    def begin(self, last: bool) -> None:
        """Start a backward pass.

        Args:
            last: Whether it is the last one of the step. Its gradients are then complete.
        """
        self._is_last_backward = last

    def mark_ready(self, parameter: nn.Parameter) -> None:
        """Note that a gradient is complete. The last one of a bucket starts its all-reduce."""
        bucket = self._bucket_of.get(parameter)
        if bucket is None:  # not reduced, or shared with a stage whose backward pass comes later
            return
        bucket.missing -= 1
        if not bucket.missing:
            bucket.comm_buffer = bucket.flat if self._comm_dtype is None else bucket.flat.to(self._comm_dtype)
            bucket.work = dist.all_reduce(bucket.comm_buffer, group=bucket.group, async_op=True)

    def finish(self) -> None:
        """Wait for all all-reduces."""
        self._is_last_backward = False  # another stage may share a parameter and run its backward pass first
        for bucket in self._buckets:
            assert bucket.work is not None, f"{bucket.missing} gradients of a bucket are missing"
            bucket.work.wait()
            if bucket.comm_buffer is not None and bucket.comm_buffer is not bucket.flat:
                bucket.flat.copy_(bucket.comm_buffer)
            bucket.missing, bucket.work, bucket.comm_buffer = bucket.size, None, None

    def _after_accumulate(self, parameter: Any) -> None:
        if self._is_last_backward:
            self.mark_ready(parameter)
