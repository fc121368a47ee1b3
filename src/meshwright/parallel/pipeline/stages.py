"""The stages of one rank at work on a step: what an action of the schedule computes.

Between its forward and its backward pass a micro-batch leaves its input and the end of its graph with the
stage. Under a schedule that splits the backward pass, the products' weights wait for the third action
(``run.models.products``); norms, biases behind a sum, the embedding and the head have their gradients at
once. Each stage knows which of its backward passes is its last one of the step: then its gradients can be
summed over the ranks of data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.measure.step_observer import StepObserver
from meshwright.models.decoder import Decoder
from meshwright.models.linear import DeferredWeightGrad, DeferredWeightGrads, Linear, defer_weight_grads
from meshwright.parallel.batch import Batch
from meshwright.parallel.bucket_reducer import BucketReducer
from meshwright.parallel.fsdp import DeferredShardGrads, set_gradient_sync
from meshwright.parallel.full_tensors import is_sharded
from meshwright.parallel.mesh import to_device
from meshwright.parallel.pipeline.mixed_precision import MixedPrecision
from meshwright.spec.job import Job

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


@dataclass
class Stage:
    """One stage, and what its micro-batches have left with it."""

    module: Decoder
    reducer: BucketReducer | None = None
    """Sums its gradients over replicas, where there are any that FSDP2 does not know of."""
    lender: FSDPModule | None = None
    """The stage whose embedding its head is, where that is cut: gathered before it is used."""
    deferred_grads: DeferredWeightGrads | None = None
    """Where its products leave what the gradients of their weights are made of."""
    deferred: DeferredShardGrads | None = None
    """Takes those gradients where weights are cut."""
    graphs: dict[int, tuple[Tensor | None, Tensor | GradientEdge]] = field(default_factory=dict)
    """By micro-batch: its input, where that has a gradient, and the end of its graph."""
    waiting: dict[int, list[DeferredWeightGrad]] = field(default_factory=dict)
    """By micro-batch: products whose weights have no gradient of it yet."""
    backward_left: int = 0
    weight_left: int = 0

    @classmethod
    def of(
        cls,
        module: Decoder,
        reducer: BucketReducer | None,
        lender: FSDPModule | None,
        split_backward: bool,
        compiled: bool,
    ) -> Stage:
        """A stage; its products put off their weights' gradients if the schedule has a place for them."""
        if not split_backward:
            return cls(module, reducer, lender)
        cut: bool = is_sharded(module)
        deferred = DeferredShardGrads(module) if cut else None
        return cls(module, reducer, lender, defer_weight_grads(module, compiled), deferred)


class StageRunner:
    """A rank's stages, working on one step after the other."""

    def __init__(
        self, stages: dict[int, Stage], job: Job, precision: MixedPrecision, device: torch.device
    ) -> None:
        """Take the stages by their numbers."""
        self._stages, self._job, self._precision, self._device = stages, job, precision, device
        self._batches: Sequence[Batch] = ()
        self._divisor = 1
        self._observer: StepObserver | None = None
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        """Of the step's micro-batches, on the rank with the last stage."""

    def begin(self, batches: Sequence[Batch], divisor: int, observer: StepObserver | None) -> None:
        """A step begins.

        Args:
            batches: Its micro-batches.
            divisor: Targets of the whole step.
            observer: Looks on.
        """
        self._batches, self._divisor, self._observer = batches, divisor, observer
        self.loss_sum = torch.zeros_like(self.loss_sum)
        for stage in self._stages.values():
            stage.backward_left = stage.weight_left = len(batches)

    def forward(self, stage: int, micro_batch: int, x: Tensor | None) -> Tensor | None:
        """A forward pass; gives the residual stream, and keeps the loss."""
        work = self._stages[stage]
        if self._observer is not None:
            self._observer.before_forward(micro_batch)
        if x is not None and torch.is_grad_enabled():
            x.requires_grad_()
        if work.lender is not None:
            work.lender.unshard()
        with self._precision.autocast():
            out = _call(work.module, self._batches[micro_batch], x, self._device)
        made = out.detach()
        if work.module.last:
            self.loss_sum += made
        if torch.is_grad_enabled():
            end = out / self._divisor if work.module.last else get_gradient_edge(out)
            work.graphs[micro_batch] = (x, end)
        del out
        if self._observer is not None:
            given = 0 if x is None else x.nbytes
            self._observer.after_forward(given if work.module.last else given - made.nbytes)
        return None if work.module.last else made

    def backward(self, stage: int, micro_batch: int, grad: Tensor | None) -> Tensor | None:
        """A backward pass; gives the gradient of the residual stream that came in."""
        work = self._stages[stage]
        if self._observer is not None:
            self._observer.before_backward(micro_batch)
        work.backward_left -= 1
        last = not work.backward_left
        if is_sharded(work.module):
            set_gradient_sync(work.module, self._job, last)
            if work.deferred is not None:
                work.deferred.defer_reduction()
        if work.reducer is not None:
            work.reducer.begin(last)
        x, end = work.graphs.pop(micro_batch)
        if isinstance(end, Tensor):
            self._precision.backward(end)
        else:
            torch.autograd.backward(end, grad)
        if work.deferred_grads is not None:
            work.waiting[micro_batch] = work.deferred_grads.pop_all()
        return None if x is None else x.grad

    @torch.no_grad()
    def weight(self, stage: int, micro_batch: int) -> None:
        """The gradients of the products' weights."""
        work = self._stages[stage]
        work.weight_left -= 1
        last = not work.weight_left
        waiting = work.waiting.pop(micro_batch)
        while waiting:
            _add_weight_grads(work, waiting.pop(0), last)
        if work.deferred is not None:
            work.deferred.reduce(self._job, last)

    def finish(self) -> None:
        """Every action of the step is done: wait for the sums over replicas."""
        for stage in self._stages.values():
            left = len(stage.graphs) + len(stage.waiting)
            assert not left, f"{left} micro-batches were left in a stage"
            if stage.reducer is not None:
                stage.reducer.finish()


def _call(module: Decoder, batch: Batch, x: Tensor | None, device: torch.device) -> Tensor:
    """A stage on a micro-batch; of the batch each stage reads what it needs."""
    return module(
        to_device(batch.inputs, device) if x is None else x,
        to_device(batch.targets, device) if module.last else None,
        to_device(batch.segments, device),
        to_device(batch.weights, device),
    )


def _add_weight_grads(work: Stage, item: DeferredWeightGrad, last: bool) -> None:
    """Make the gradients of one product and add them.

    When it returns, none of its tensors is held: the next gradient and the reduction need the memory.
    """
    for name, gradient in item.compute():
        if work.deferred is not None:
            work.deferred.add(item.linear, name, gradient)
            continue
        parameter = _add(item.linear, name, gradient)
        if last and work.reducer is not None:
            work.reducer.mark_ready(parameter)


def _add(linear: Linear, name: str, gradient: Tensor) -> nn.Parameter:
    """Add to a parameter's gradient, in float32."""
    parameter: Any = getattr(linear, name)
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad += gradient
    return parameter
