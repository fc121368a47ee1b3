"""Sums of gradients over replicas in a pipeline: by buckets, as soon as a stage's last backward pass allows.

torch's DDP expects a forward pass, its backward pass, and the next forward pass; with several stages on a
rank, or a backward pass in two parts, it fails in the second step. Here the schedule says which backward pass
of a stage is its last one. Gradients are views of flat buckets (``plan.buckets``) from the start; a bucket is
summed, every rank sending its own and getting the sum, when the last of its parameters is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.run.precision import LOW_PRECISION


class _Bucket:
    """Gradients that travel together."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.flat = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
        self.size = self.missing = len(parameters)
        self.sent: Tensor | None = None
        self.work: dist.Work | None = None
        views = self.flat.split([p.numel() for p in parameters])
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view.view_as(parameter)


class StageReducer:
    """The buckets of one stage."""

    def __init__(
        self,
        stage: nn.Module,
        buckets: Sequence[Sequence[str]],
        group: dist.ProcessGroup,
        compression: str,
    ) -> None:
        """Give the stage's parameters gradients in buckets.

        Args:
            stage: Its module.
            buckets: Names of its parameters, each once.
            group: The replicas.
            compression: As ``compression.kind`` says.
        """
        named = dict(stage.named_parameters())
        self._group, self._wire = group, LOW_PRECISION.get(compression)
        self._buckets = [_Bucket([named[name] for name in names]) for names in buckets]
        self._home = {named[name]: b for b, names in zip(self._buckets, buckets, strict=True) for name in names}
        self._armed = False
        for parameter in self._home:
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def begin(self, last: bool) -> None:
        """A backward pass begins; after the stage's last one nothing is added to what it completes."""
        self._armed = last

    def complete(self, parameter: nn.Parameter) -> None:
        """A parameter has its gradient of the whole step."""
        bucket = self._home.get(parameter)
        if bucket is None:  # shared with a stage that runs backward later
            return
        bucket.missing -= 1
        if not bucket.missing:
            bucket.sent = bucket.flat if self._wire is None else bucket.flat.to(self._wire)
            bucket.work = dist.all_reduce(bucket.sent, group=self._group, async_op=True)

    def finish(self) -> None:
        """Wait until every bucket is summed."""
        for bucket in self._buckets:
            assert bucket.work is not None, f"{bucket.missing} gradients of a bucket did not come"
            bucket.work.wait()
            if bucket.sent is not bucket.flat:
                bucket.flat.copy_(bucket.sent)
            bucket.missing, bucket.work, bucket.sent = bucket.size, None, None

    def _accumulated(self, parameter: Any) -> None:
        if self._armed:
            self.complete(parameter)
