"""Matrix products: from a copy in 16 bits, several as one, or with a weight gradient that can wait.

**A copy in 16 bits** (:class:`WorkingCopies` of ``run.working`` makes and keeps them). Under autocast every
forward pass casts every float32 matrix, every backward pass may again, and the gradient is made in 16 bits
and cast back: 18 bytes a weight cross memory beside the product. With a copy that lives from step to step
none do, and the gradient's product writes float32 itself: nothing is rounded on the way. Products that read
the same input are one product over copies that lie below each other.

**Gradients that can wait** are what a backward pass that is split in two needs. Only the gradient of a
stage's input is waited for by another rank. Under a schedule that splits the backward pass, each product of
the stage's blocks makes that one at once, and leaves its input and the gradient of its output in
:class:`Later`; the gradient of its weight is made of the two when the schedule says so. It needs neither the
weight nor the graph, so sharded weights need not be gathered for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.models.kernels import fp8


class DeferredWeightGrad(NamedTuple):
    """A product whose weight's gradient is still to be made."""

    linear: Linear
    x: Tensor
    grad: Tensor
    """Of its output."""

    def compute(self) -> Iterator[tuple[str, Tensor]]:
        """Those of the weight and of the bias, by name, in the precision of the product."""
        grad_NO = self.grad.flatten(0, -2)
        yield "weight", grad_NO.T @ self.x.flatten(0, -2)
        if "bias" in self.linear.deferrable_names():
            yield "bias", grad_NO.sum(0)


class DeferredWeightGrads:
    """What a stage's backward pass leaves for later, in its order."""

    def __init__(self, compiled: bool = False) -> None:
        """Nothing is left yet.

        Args:
            compiled: Whether what is around the products is compiled. They stay out of reach of the compiler,
                which would make one piece of a backward pass.
        """
        self._deferred: list[DeferredWeightGrad] = []
        apply: Callable[..., Tensor] = _InputGradLinear.apply
        self.matmul = torch.compiler.disable(apply) if compiled else apply
        """A product that leaves something here."""

    def append(self, deferred: DeferredWeightGrad) -> None:
        """One more."""
        self._deferred.append(deferred)

    def pop_all(self) -> list[DeferredWeightGrad]:
        """All of it; then there is nothing."""
        taken, self._deferred = self._deferred, []
        return taken


class Linear(nn.Linear):
    """A linear layer that leaves the gradient of its weight for later where it is told to."""

    deferred_grads: DeferredWeightGrads | None = None
    weight_copy: Tensor | None = None
    """Its weight in the precision of the product, where a copy is kept."""
    adds_bias = True
    """Whether its bias is a part of the product."""
    uses_fp8 = False
    """Whether it is computed in 8 bits."""
    uses_fp8_weight_grad = False
    """Whether the gradient of its weight is, too."""

    def deferrable_names(self) -> tuple[str, ...]:
        """Its parameters whose gradients can wait."""
        return ("weight", "bias") if self.adds_bias and self.bias is not None else ("weight",)

    def forward(self, x: Tensor) -> Tensor:
        """``x W' + b``."""
        return self.matmul(x, self.bias)

    def matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product, with a bias or without."""
        if self.uses_fp8 or self.weight_copy is not None:
            out = _linear_from_copy(
                self, x, self.weight if self.weight_copy is None else self.weight_copy, self.weight
            )
            return out if bias is None else out + bias.to(out.dtype)
        if self.deferred_grads is None or not torch.is_grad_enabled():
            return F.linear(x, self.weight, bias)
        return self.deferred_grads.matmul(x, self.weight, bias, self)


class MergedLinear:
    """Products without bias that read the same input, as one."""

    def __init__(self, linears: Sequence[Linear], weight_copy: Tensor) -> None:
        """Join them.

        Args:
            linears: In order.
            weight_copy: Copies of their weights, one below the other.
        """
        self._masters = [linear.weight for linear in linears]
        self.weight_copy = weight_copy
        """The copies."""
        self._widths = [linear.out_features for linear in linears]
        self.uses_fp8 = all(linear.uses_fp8 for linear in linears)
        """Whether it is computed in 8 bits."""
        self.uses_fp8_weight_grad = all(linear.uses_fp8_weight_grad for linear in linears)
        """Whether the gradients of its weights are, too."""

    def matmul(self, x: Tensor) -> tuple[Tensor, ...]:
        """What each of them gives."""
        return _linear_from_copy(self, x, self.weight_copy, *self._masters).split(self._widths, dim=-1)


def _linear_from_copy(
    linear: Linear | MergedLinear, x: Tensor, weight_copy: Tensor, *masters: Tensor
) -> Tensor:
    """In the 8 or 16 bits of a product, or of several as one."""
    if linear.uses_fp8:
        return fp8_linear(x, weight_copy, *masters, uses_fp8_weight_grad=linear.uses_fp8_weight_grad)
    return low_precision_linear(x, weight_copy, *masters)


def low_precision_linear(x: Tensor, weight_copy: Tensor, *masters: Tensor) -> Tensor:
    """``x low'``, whose weight gradients go to the float32 matrices that ``low`` is a copy of.

    Args:
        x: In the precision of the copy, or made so.
        weight_copy: Of the matrices, one below the other.
        masters: The matrices.
    """
    if not torch.is_grad_enabled():  # torch 2.11 cannot compile the function below then
        return F.linear(x.to(weight_copy.dtype), weight_copy)
    out: Tensor = _LowPrecisionLinear.apply(x, weight_copy, *masters)
    return out


class _LowPrecisionLinear(torch.autograd.Function):
    """A product whose weight gradient is float32 from the start."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_copy: Tensor, *masters: Tensor) -> Tensor:
        x = x.to(weight_copy.dtype)
        ctx.save_for_backward(x, weight_copy)
        ctx.rows = [master.shape[0] for master in masters]
        return F.linear(x, weight_copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_copy = ctx.saved_tensors
        whole = weight_grad(grad.flatten(0, -2), x.flatten(0, -2))
        return grad @ weight_copy, None, *whole.split(ctx.rows)


def fp8_linear(x: Tensor, weight_copy: Tensor, *masters: Tensor, uses_fp8_weight_grad: bool) -> Tensor:
    """The same in 8 bits, made of the copy (or of a matrix that has none); what comes out is bfloat16.

    Args:
        x: Of any precision.
        weight_copy: Of the matrices, one below the other.
        masters: The matrices.
        uses_fp8_weight_grad: Whether their gradients are products in 8 bits as well; else they are of 16.
    """
    x_NI, weight_copy_OI = x.flatten(0, -2), weight_copy.detach()
    if torch.is_grad_enabled():
        out: Tensor = _Fp8Linear.apply(x_NI, weight_copy_OI, uses_fp8_weight_grad, *masters)
    else:
        out = fp8.forward(*fp8.cast_rows(x_NI), weight_copy_OI)
    return out.unflatten(0, x.shape[:-1])


class _Fp8Linear(torch.autograd.Function):
    """A product in 8 bits, and in the backward pass another two, or one and the weight gradient of a copy."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weight_copy_OI: Tensor, uses_fp8_weight_grad: bool, *masters: Tensor
    ) -> Tensor:
        cast_NI, scale_N1 = fp8.cast_rows(x_NI)
        ctx.in_fp8 = uses_fp8_weight_grad and x_NI.shape[0] % fp8.ALIGNMENT == 0
        ctx.save_for_backward(weight_copy_OI, *((cast_NI, scale_N1) if ctx.in_fp8 else (x_NI.bfloat16(),)))
        ctx.rows, ctx.kind = [master.shape[0] for master in masters], masters[0].dtype
        ctx.input_kind = x_NI.dtype
        return fp8.forward(cast_NI, scale_N1, weight_copy_OI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        weight_copy_OI, *kept = ctx.saved_tensors
        grad_NI = fp8.input_grad(grad_NO, weight_copy_OI).to(ctx.input_kind)
        whole_OI = (fp8.weight_grad if ctx.in_fp8 else weight_grad)(grad_NO, *kept)
        return grad_NI, None, None, *whole_OI.to(ctx.kind).split(ctx.rows)


def float32_weight_grad(grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    """``grad' x``, (O, I), in float32: summed in it on every device, and on GPUs never rounded to less."""
    if grad_NO.is_cuda:
        return torch.mm(grad_NO.T, x_NI, out_dtype=torch.float32)
    return torch.mm(grad_NO.T, x_NI).float()


@torch.library.custom_op("meshwright::weight_grad", mutates_args=())
def weight_grad(grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    """The same as one operation, which a compiler does not look into; it costs the host 40 us."""
    return float32_weight_grad(grad_NO, x_NI)


@weight_grad.register_fake
def _(grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    return grad_NO.new_empty(grad_NO.shape[1], x_NI.shape[1], dtype=torch.float32)


class _InputGradLinear(torch.autograd.Function):
    """A product whose backward pass makes the gradient of the input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear) -> Tensor:
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        ctx.save_for_backward(x, weight)
        ctx.linear = linear
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.linear.deferred_grads.append(DeferredWeightGrad(ctx.linear, x, grad))
        return grad @ weight.to(grad.dtype), None, None, None


def deferrable_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Of a module's parameters those whose gradients can wait."""
    linears = [part for part in module.modules() if isinstance(part, Linear)]
    return {part.get_parameter(name) for part in linears for name in part.deferrable_names()}


def defer_weight_grads(module: nn.Module, compiled: bool) -> DeferredWeightGrads:
    """From now on the products of a module leave the gradients of their weights in what is returned."""
    deferred_grads = DeferredWeightGrads(compiled)
    for part in module.modules():
        if isinstance(part, Linear):
            part.deferred_grads = deferred_grads
    return deferred_grads


def convert_linears_to_fp8(module: nn.Module, gradients: bool) -> None:
    """From now on the products of a module are computed in 8 bits, but for shapes that those do not take.

    Args:
        module: That has them.
        gradients: Whether gradients of their weights are, too.
    """
    for part in module.modules():
        if isinstance(part, Linear):
            part.uses_fp8 = fp8.is_fp8_shape(part.out_features, part.in_features)
            part.uses_fp8_weight_grad = part.uses_fp8 and gradients
