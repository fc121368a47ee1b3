"""Linear layers: with bf16 weight copies, merged projections, FP8, and a split backward pass.

**bf16 weight copies** (``bf16_weights`` allocates and refreshes them). Under autocast every forward pass
casts every float32 weight, every backward pass may cast it again, and the weight gradient is computed in 16
bits and cast back: these casts move 18 bytes per weight. A 16-bit copy that persists across steps needs no
casts. Its weight-gradient GEMM writes float32, so the gradient is not rounded to 16 bits. Projections that
share an input (q, k, v; gate, up) run as one GEMM over concatenated copies (:class:`MergedLinear`).

**Split backward.** Another rank needs only the input gradient of a pipeline stage. Under a schedule
that splits the backward pass, each linear layer of the stage's blocks computes its input gradient at once and
stores its input and output gradient in :class:`DeferredWeightGrads`. The weight gradient is computed from the
two when the schedule says so. It needs neither the weight nor the autograd graph, so sharded weights are not
gathered for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  (the usual alias)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.models.kernels import fp8
from meshwright.models.kernels.fp8 import GemmOperand
from meshwright.models.kernels.gemm import float32_weight_grad


class DeferredWeightGrad(NamedTuple):
    """A weight gradient that is still to be computed."""

    linear: Linear
    x: Tensor
    grad: Tensor
    """Gradient of the output."""

    def compute(self) -> Iterator[tuple[str, Tensor]]:
        """Gradients of the weight and the bias, by name, in the GEMM's dtype."""
        grad_NO = self.grad.flatten(0, -2)
        yield "weight", grad_NO.T @ self.x.flatten(0, -2)
        if "bias" in self.linear.deferrable_names():
            yield "bias", grad_NO.sum(0)


class DeferredWeightGrads:
    """The weight gradients that a stage's backward pass defers, in its order."""

    def __init__(self, compiled: bool = False) -> None:
        """Start empty.

        Args:
            compiled: Whether the code around the linears is compiled. The linears are hidden from the
                compiler, which would otherwise merge both halves of the backward pass.
        """
        self._deferred: list[DeferredWeightGrad] = []
        apply: Callable[..., Tensor] = _InputGradLinear.apply
        self.linear = torch.compiler.disable(apply) if compiled else apply
        """A linear that defers its weight gradient to here."""

    def append(self, deferred: DeferredWeightGrad) -> None:
        """Defer one more."""
        self._deferred.append(deferred)

    def pop_all(self) -> list[DeferredWeightGrad]:
        """Remove and return all of them."""
        taken, self._deferred = self._deferred, []
        return taken


class Linear(nn.Linear):
    """``nn.Linear`` with an optional 16-bit weight copy, FP8 GEMMs or deferred weight gradients."""

    deferred_grads: DeferredWeightGrads | None = None
    weight_copy: Tensor | None = None
    """The weight in the GEMM's dtype, if a copy persists."""
    adds_bias = True
    """Whether the bias is added by this layer's GEMM."""
    uses_fp8 = False
    uses_fp8_weight_grad = False

    def deferrable_names(self) -> tuple[str, ...]:
        """Names of the parameters whose gradients can be deferred."""
        return ("weight", "bias") if self.adds_bias and self.bias is not None else ("weight",)

    def forward(self, x: Tensor) -> Tensor:
        """``x W' + b``."""
        return self.matmul(x, self.bias)

    def matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x W'``, plus a bias if given."""
        if self.uses_fp8 or self.weight_copy is not None:
            weight = self.weight if self.weight_copy is None else self.weight_copy
            out = _low_precision_or_fp8(self, x, weight, self.weight)
            return out if bias is None else out + bias.to(out.dtype)
        if self.deferred_grads is None or not torch.is_grad_enabled():
            return F.linear(x, self.weight, bias)
        return self.deferred_grads.linear(x, self.weight, bias, self)


class MergedLinear:
    """Linears without bias that share an input, as one GEMM."""

    def __init__(self, linears: Sequence[Linear], weight_copy: Tensor) -> None:
        """Merge them.

        Args:
            linears: In order.
            weight_copy: Copies of their weights, concatenated.
        """
        self._masters = [linear.weight for linear in linears]
        self.weight_copy = weight_copy
        self._widths = [linear.out_features for linear in linears]
        self.uses_fp8 = all(linear.uses_fp8 for linear in linears)
        self.uses_fp8_weight_grad = all(linear.uses_fp8_weight_grad for linear in linears)

    def matmul(self, x: Tensor) -> tuple[Tensor, ...]:
        """The output of each linear."""
        return _low_precision_or_fp8(self, x, self.weight_copy, *self._masters).split(self._widths, dim=-1)


def _low_precision_or_fp8(
    linear: Linear | MergedLinear, x: Tensor, weight_copy: Tensor, *masters: Tensor
) -> Tensor:
    if linear.uses_fp8:
        return fp8_linear(x, weight_copy, *masters, fp8_weight_grad=linear.uses_fp8_weight_grad)
    return low_precision_linear(x, weight_copy, *masters)


def low_precision_linear(x: Tensor, weight_copy: Tensor, *masters: Tensor) -> Tensor:
    """``x W'`` of a 16-bit weight copy, whose gradients go to the float32 master weights.

    Args:
        x: Cast to the copy's dtype.
        weight_copy: 16-bit weight copy of the masters, concatenated.
        masters: The parameters.
    """
    if not torch.is_grad_enabled():  # torch 2.11 cannot compile the function below then
        return F.linear(x.to(weight_copy.dtype), weight_copy)
    out: Tensor = _LowPrecisionLinear.apply(x, weight_copy, *masters)
    return out


class _LowPrecisionLinear(torch.autograd.Function):
    """A linear whose weight gradient is float32 from the start."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_copy: Tensor, *masters: Tensor) -> Tensor:
        x = x.to(weight_copy.dtype)
        ctx.save_for_backward(x, weight_copy)
        ctx.rows = [master.shape[0] for master in masters]
        return F.linear(x, weight_copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_copy = ctx.saved_tensors
        merged_grad = weight_grad(grad.flatten(0, -2), x.flatten(0, -2))
        return grad @ weight_copy, None, *merged_grad.split(ctx.rows)


def fp8_linear(x: Tensor, weight_copy: Tensor, *masters: Tensor, fp8_weight_grad: bool) -> Tensor:
    """``x W'`` as an FP8 GEMM; the output is bfloat16.

    Args:
        x: Of any dtype.
        weight_copy: 16-bit weight copy of the masters, concatenated; or the only master itself.
        masters: The parameters.
        fp8_weight_grad: Whether the weight gradient is an FP8 GEMM too; else it reads 16 bits.
    """
    x_NI, weight_OI = x.flatten(0, -2), weight_copy.detach()
    if torch.is_grad_enabled():
        out: Tensor = _Fp8Linear.apply(x_NI, weight_OI, fp8_weight_grad, *masters)
    else:
        out = fp8.forward(fp8.cast_rows(x_NI), fp8.cast_rows(weight_OI))
    return out.unflatten(0, x.shape[:-1])


class _Fp8Linear(torch.autograd.Function):
    """An FP8 linear; ``kernels.fp8`` explains its casts."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, fp8_weight_grad: bool, *masters: Tensor) -> Tensor:
        x = fp8.cast_rows(x_NI)
        ctx.fp8_weight_grad = fp8_weight_grad and x_NI.shape[0] % fp8.ALIGNMENT == 0
        ctx.save_for_backward(weight_OI, *(x if ctx.fp8_weight_grad else (x_NI.bfloat16(),)))
        ctx.rows, ctx.weight_dtype = [master.shape[0] for master in masters], masters[0].dtype
        ctx.input_dtype = x_NI.dtype
        return fp8.forward(x, fp8.cast_rows(weight_OI))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        weight_OI, *saved = ctx.saved_tensors
        weight = fp8.cast_rows(weight_OI)
        grad = fp8.cast_rows(grad_NO, by=weight.scale)
        grad_NI = fp8.input_grad(grad, fp8.transpose(weight.values)).to(ctx.input_dtype)
        if ctx.fp8_weight_grad:
            x_NI, scale_N1 = saved
            grad_ON = fp8.cast_columns(grad_NO.float() * scale_N1)
            merged_OI = fp8.weight_grad(grad_ON, GemmOperand(fp8.transpose(x_NI)))
        else:
            merged_OI = weight_grad(grad_NO, *saved)
        return grad_NI, None, None, *merged_OI.to(ctx.weight_dtype).split(ctx.rows)


@torch.library.custom_op("meshwright::weight_grad", mutates_args=())
def weight_grad(grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    """:func:`float32_weight_grad` as a custom op, opaque to torch.compile; it costs the CPU 40 us."""
    return float32_weight_grad(grad_NO, x_NI)


@weight_grad.register_fake
def _(grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    return grad_NO.new_empty(grad_NO.shape[1], x_NI.shape[1], dtype=torch.float32)


class _InputGradLinear(torch.autograd.Function):
    """A linear whose backward pass computes the input gradient only and defers the weight gradient."""

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
    """The parameters of a module whose gradients can be deferred."""
    linears = [part for part in module.modules() if isinstance(part, Linear)]
    return {part.get_parameter(name) for part in linears for name in part.deferrable_names()}


def defer_weight_grads(module: nn.Module, compiled: bool) -> DeferredWeightGrads:
    """Split the backward pass of a module's linears: their weight gradients go to the returned object."""
    deferred_grads = DeferredWeightGrads(compiled)
    for part in module.modules():
        if isinstance(part, Linear):
            part.deferred_grads = deferred_grads
    return deferred_grads


def convert_linears_to_fp8(module: nn.Module, weight_grads: bool) -> None:
    """Run the linears of a module as FP8 GEMMs, except for unsupported shapes.

    Args:
        module: Changed in place.
        weight_grads: Whether the weight gradients are FP8 GEMMs too.
    """
    for part in module.modules():
        if isinstance(part, Linear):
            part.uses_fp8 = fp8.is_fp8_shape(part.out_features, part.in_features)
            part.uses_fp8_weight_grad = part.uses_fp8 and weight_grads
