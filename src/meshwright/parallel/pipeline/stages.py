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

from meshwright.measure.step_watch import StepWatch
from meshwright.models.decoder import Decoder
from meshwright.models.linear import Later, Product, Waiting, put_off
from meshwright.parallel.batch import Batch
from meshwright.parallel.bucket_reducer import BucketReducer
from meshwright.parallel.fsdp import LateGradients, begin_micro_batch
from meshwright.parallel.full_tensors import is_cut
from meshwright.parallel.mesh import move
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
    later: Later | None = None
    """Where its products leave what the gradients of their weights are made of."""
    late: LateGradients | None = None
    """Takes those gradients where weights are cut."""
    graphs: dict[int, tuple[Tensor | None, Tensor | GradientEdge]] = field(default_factory=dict)
    """By micro-batch: its input, where that has a gradient, and the end of its graph."""
    waiting: dict[int, list[Waiting]] = field(default_factory=dict)
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
        cut: bool = is_cut(module)
        late = LateGradients(module) if cut else None
        return cls(module, reducer, lender, put_off(module, compiled), late)


class StageWork:
    """A rank's stages, working on one step after the other."""

    def __init__(
        self, stages: dict[int, Stage], job: Job, precision: MixedPrecision, device: torch.device
    ) -> None:
        """Take the stages by their numbers."""
        self._stages, self._job, self._precision, self._device = stages, job, precision, device
        self._batches: Sequence[Batch] = ()
        self._divisor = 1
        self._watch: StepWatch | None = None
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        """Of the step's micro-batches, on the rank with the last stage."""

    def begin(self, batches: Sequence[Batch], divisor: int, watch: StepWatch | None) -> None:
        """A step begins.

        Args:
            batches: Its micro-batches.
            divisor: Targets of the whole step.
            watch: Looks on.
        """
        self._batches, self._divisor, self._watch = batches, divisor, watch
        self.loss_sum = torch.zeros_like(self.loss_sum)
        for stage in self._stages.values():
            stage.backward_left = stage.weight_left = len(batches)

    def forward(self, stage: int, micro_batch: int, x: Tensor | None) -> Tensor | None:
        """A forward pass; gives the residual stream, and keeps the loss."""
        work = self._stages[stage]
        if self._watch is not None:
            self._watch.before_forward(micro_batch)
        if x is not None and torch.is_grad_enabled():
            x.requires_grad_()
        if work.lender is not None:
            work.lender.unshard()
        with self._precision.products():
            out = _call(work.module, self._batches[micro_batch], x, self._device)
        made = out.detach()
        if work.module.last:
            self.loss_sum += made
        if torch.is_grad_enabled():
            end = out / self._divisor if work.module.last else get_gradient_edge(out)
            work.graphs[micro_batch] = (x, end)
        del out
        if self._watch is not None:
            given = 0 if x is None else x.nbytes
            self._watch.after_forward(given if work.module.last else given - made.nbytes)
        return None if work.module.last else made

    def backward(self, stage: int, micro_batch: int, grad: Tensor | None) -> Tensor | None:
        """A backward pass; gives the gradient of the residual stream that came in."""
        work = self._stages[stage]
        if self._watch is not None:
            self._watch.before_backward(micro_batch)
        work.backward_left -= 1
        last = not work.backward_left
        if is_cut(work.module):
            begin_micro_batch(work.module, self._job, last)
            if work.late is not None:
                work.late.hold_back()
        if work.reducer is not None:
            work.reducer.begin(last)
        x, end = work.graphs.pop(micro_batch)
        if isinstance(end, Tensor):
            self._precision.backward(end)
        else:
            torch.autograd.backward(end, grad)
        if work.later is not None:
            work.waiting[micro_batch] = work.later.take()
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
        if work.late is not None:
            work.late.reduce(self._job, last)

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
        move(batch.inputs, device) if x is None else x,
        move(batch.targets, device) if module.last else None,
        move(batch.segments, device),
        move(batch.weights, device),
    )


def _add_weight_grads(work: Stage, put_off: Waiting, last: bool) -> None:
    """Make the gradients of one product and add them.

    When it returns, none of its tensors is held: the next gradient and the reduction need the memory.
    """
    for name, gradient in put_off.gradients():
        if work.late is not None:
            work.late.add(put_off.product, name, gradient)
            continue
        parameter = _add(put_off.product, name, gradient)
        if last and work.reducer is not None:
            work.reducer.complete(parameter)


def _add(product: Product, name: str, gradient: Tensor) -> nn.Parameter:
    """Add to a parameter's gradient, in float32."""
    parameter: Any = getattr(product, name)
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad += gradient
    return parameter
