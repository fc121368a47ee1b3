"""Sums of gradients where torch's DDP cannot make them: by buckets, as soon as the last backward pass allows.

DDP expects a forward pass, its backward pass, and the next forward pass; with several stages of a pipeline on
a rank, or a backward pass in two parts, it fails in the second step. And it sums all parameters over the same
ranks, which are not those of experts. Here whoever calls the backward pass says which is its last one of the
step. Gradients are views of flat buckets (``plan.buckets``) from the start; a bucket is summed, every rank
sending its own and getting the sum, when the last of its parameters is complete.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.models.dtypes import AUTOCAST_DTYPES

Buckets = Sequence[tuple[Sequence[str], dist.ProcessGroup]]
"""Names of parameters, each once, and the ranks over which they are summed."""


class _Bucket:
    """Gradients that travel together."""

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
    """The buckets of a model, or of one stage."""

    def __init__(
        self,
        module: nn.Module,
        buckets: Buckets,
        compression: str,
        deferred: Collection[nn.Parameter] = (),
    ) -> None:
        """Give parameters gradients in buckets.

        Args:
            module: The model or the stage.
            buckets: Of its parameters those that are summed.
            compression: As ``compression.kind`` says.
            deferred: Those whose gradients do not come in a backward pass: who makes them says so.
        """
        named = dict(module.named_parameters())
        self._comm_dtype = AUTOCAST_DTYPES.get(compression)
        self._buckets = [_Bucket([named[name] for name in names], group) for names, group in buckets]
        pairs = zip(self._buckets, buckets, strict=True)
        self._bucket_of = {named[name]: bucket for bucket, (names, _) in pairs for name in names}
        self._is_last_backward = False
        for parameter in self._bucket_of.keys() - set(deferred):
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def begin(self, last: bool) -> None:
        """A backward pass begins; after the last one nothing is added to what it completes."""
        self._is_last_backward = last

    def mark_ready(self, parameter: nn.Parameter) -> None:
        """A parameter has its gradient of the whole step."""
        bucket = self._bucket_of.get(parameter)
        if bucket is None:  # nobody else's, or shared with a stage that runs backward later
            return
        bucket.missing -= 1
        if not bucket.missing:
            bucket.comm_buffer = bucket.flat if self._comm_dtype is None else bucket.flat.to(self._comm_dtype)
            bucket.work = dist.all_reduce(bucket.comm_buffer, group=bucket.group, async_op=True)

    def finish(self) -> None:
        """Wait until every bucket is summed."""
        self._is_last_backward = (
            False  # another stage may share a parameter, and its backward pass comes first
        )
        for bucket in self._buckets:
            assert bucket.work is not None, f"{bucket.missing} gradients of a bucket did not come"
            bucket.work.wait()
            if bucket.comm_buffer is not None and bucket.comm_buffer is not bucket.flat:
                bucket.flat.copy_(bucket.comm_buffer)
            bucket.missing, bucket.work, bucket.comm_buffer = bucket.size, None, None

    def _accumulated(self, parameter: Any) -> None:
        if self._is_last_backward:
            self.mark_ready(parameter)
