"""Runs the actions of a schedule on the pipeline stages of one rank.

Between its forward and its backward pass a micro-batch leaves its input and the end of its autograd graph
with the stage. With a split backward pass the weight gradients of linears are computed in the third action
(``models.linear``). Norms, biases added after a reduction, embedding and head have their gradients at once.
After its last backward pass of a step, the gradients of a stage are reduced over data parallelism.
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
from meshwright.parallel.fsdp import set_gradient_sync
from meshwright.parallel.fsdp_deferred_grads import DeferredShardGrads
from meshwright.parallel.full_tensors import is_sharded
from meshwright.parallel.mesh import to_device
from meshwright.parallel.pipeline.mixed_precision import MixedPrecision
from meshwright.spec.job import Job

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


@dataclass
class Stage:
    """One stage, and the state of its in-flight micro-batches."""

    module: Decoder
    reducer: BucketReducer | None = None
    """All-reduces its gradients over replicas, where FSDP2 does not."""
    embedding_stage: FSDPModule | None = None
    """The FSDP-sharded stage whose embedding its head uses: gathered before a forward pass."""
    deferred_grads: DeferredWeightGrads | None = None
    """Where a split backward pass leaves the inputs of its weight gradients."""
    shard_grads: DeferredShardGrads | None = None
    """Takes the deferred weight gradients of FSDP-sharded weights."""
    graphs: dict[int, tuple[Tensor | None, Tensor | GradientEdge]] = field(default_factory=dict)
    """By micro-batch: its input, where that has a gradient, and the end of its graph."""
    deferred: dict[int, list[DeferredWeightGrad]] = field(default_factory=dict)
    """By micro-batch: linears whose weight gradients are not computed yet."""
    backward_left: int = 0
    weight_left: int = 0

    @classmethod
    def build(
        cls,
        module: Decoder,
        reducer: BucketReducer | None,
        embedding_stage: FSDPModule | None,
        split_backward: bool,
        compiled: bool,
    ) -> Stage:
        """A stage whose linears defer their weight gradients if the schedule splits the backward pass."""
        if not split_backward:
            return cls(module, reducer, embedding_stage)
        sharded: bool = is_sharded(module)
        shard_grads = DeferredShardGrads(module) if sharded else None
        return cls(module, reducer, embedding_stage, defer_weight_grads(module, compiled), shard_grads)


class StageRunner:
    """Runs the stages of a rank."""

    def __init__(
        self, stages: dict[int, Stage], job: Job, precision: MixedPrecision, device: torch.device
    ) -> None:
        self._stages, self._job, self._precision, self._device = stages, job, precision, device
        self._batches: Sequence[Batch] = ()
        self._num_targets = 1
        self._observer: StepObserver | None = None
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        """Summed loss of the step's micro-batches, on the rank with the last stage."""

    def begin(self, batches: Sequence[Batch], num_targets: int, observer: StepObserver | None) -> None:
        """Start a step.

        Args:
            batches: Its micro-batches.
            num_targets: Target tokens of the global batch, by which the loss is divided.
            observer: Observes the step.
        """
        self._batches, self._num_targets, self._observer = batches, num_targets, observer
        self.loss_sum = torch.zeros_like(self.loss_sum)
        for stage in self._stages.values():
            stage.backward_left = stage.weight_left = len(batches)

    def forward(self, stage: int, micro_batch: int, x: Tensor | None) -> Tensor | None:
        """Run a forward pass. Returns the residual stream; the last stage adds to the loss instead."""
        work = self._stages[stage]
        if self._observer is not None:
            self._observer.before_forward(micro_batch)
        if x is not None and torch.is_grad_enabled():
            x.requires_grad_()
        if work.embedding_stage is not None:
            work.embedding_stage.unshard()
        with self._precision.autocast():
            out = _call(work.module, self._batches[micro_batch], x, self._device)
        result = out.detach()
        if work.module.last:
            self.loss_sum += result
        if torch.is_grad_enabled():
            end = out / self._num_targets if work.module.last else get_gradient_edge(out)
            work.graphs[micro_batch] = (x, end)
        del out
        if self._observer is not None:
            given = 0 if x is None else x.nbytes
            self._observer.after_forward(given if work.module.last else given - result.nbytes)
        return None if work.module.last else result

    def backward(self, stage: int, micro_batch: int, grad: Tensor | None) -> Tensor | None:
        """Run a backward pass. Returns the gradient of the stage's input."""
        work = self._stages[stage]
        if self._observer is not None:
            self._observer.before_backward(micro_batch)
        work.backward_left -= 1
        last = not work.backward_left
        if is_sharded(work.module):
            set_gradient_sync(work.module, self._job, last)
            if work.shard_grads is not None:
                work.shard_grads.defer_reduction()
        if work.reducer is not None:
            work.reducer.begin(last)
        x, end = work.graphs.pop(micro_batch)
        self._precision.backward(end, grad)
        if work.deferred_grads is not None:
            work.deferred[micro_batch] = work.deferred_grads.pop_all()
        return None if x is None else x.grad

    @torch.no_grad()
    def weight(self, stage: int, micro_batch: int) -> None:
        """Compute the deferred weight gradients of a micro-batch."""
        work = self._stages[stage]
        work.weight_left -= 1
        last = not work.weight_left
        deferred = work.deferred.pop(micro_batch)
        while deferred:
            _add_weight_grads(work, deferred.pop(0), last)
        if work.shard_grads is not None:
            work.shard_grads.reduce(self._job, last)

    def finish(self) -> None:
        """End a step: wait for the all-reduces over replicas."""
        for stage in self._stages.values():
            left = len(stage.graphs) + len(stage.deferred)
            assert not left, f"{left} micro-batches are still in flight in a stage"
            if stage.reducer is not None:
                stage.reducer.finish()


def _call(module: Decoder, batch: Batch, x: Tensor | None, device: torch.device) -> Tensor:
    """Call a stage on a micro-batch. The first stage reads the tokens, the last one the targets."""
    return module(
        to_device(batch.inputs, device) if x is None else x,
        to_device(batch.targets, device) if module.last else None,
        to_device(batch.segments, device),
        to_device(batch.weights, device),
    )


def _add_weight_grads(work: Stage, item: DeferredWeightGrad, last: bool) -> None:
    """Compute and accumulate the gradients of one linear.

    No tensor of it is referenced after the return: the next gradient and the reduction need the memory.
    """
    for name, gradient in item.compute():
        if work.shard_grads is not None:
            work.shard_grads.add(item.linear, name, gradient)
            continue
        parameter = _accumulate(item.linear, name, gradient)
        if last and work.reducer is not None:
            work.reducer.mark_ready(parameter)


def _accumulate(linear: Linear, name: str, gradient: Tensor) -> nn.Parameter:
    """Add to a parameter's gradient, in float32."""
    parameter: Any = getattr(linear, name)
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad += gradient
    return parameter
