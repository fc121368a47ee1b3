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


class Waiting(NamedTuple):
    """A product whose weight's gradient is still to be made."""

    product: Product
    x: Tensor
    grad: Tensor
    """Of its output."""

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Those of the weight and of the bias, by name, in the precision of the product."""
        grad_NO = self.grad.flatten(0, -2)
        yield "weight", grad_NO.T @ self.x.flatten(0, -2)
        if "bias" in self.product.late_names():
            yield "bias", grad_NO.sum(0)


class Later:
    """What a stage's backward pass leaves for later, in its order."""

    def __init__(self, compiled: bool = False) -> None:
        """Nothing is left yet.

        Args:
            compiled: Whether what is around the products is compiled. They stay out of reach of the compiler,
                which would make one piece of a backward pass.
        """
        self._waiting: list[Waiting] = []
        apply: Callable[..., Tensor] = _InputGradient.apply
        self.multiply = torch.compiler.disable(apply) if compiled else apply
        """A product that leaves something here."""

    def keep(self, waiting: Waiting) -> None:
        """One more."""
        self._waiting.append(waiting)

    def take(self) -> list[Waiting]:
        """All of it; then there is nothing."""
        taken, self._waiting = self._waiting, []
        return taken


class Product(nn.Linear):
    """A linear layer that leaves the gradient of its weight for later where it is told to."""

    later: Later | None = None
    low: Tensor | None = None
    """Its weight in the precision of the product, where a copy is kept."""
    adds_bias = True
    """Whether its bias is a part of the product."""
    scaled = False
    """Whether it is computed in 8 bits."""
    gradient_scaled = False
    """Whether the gradient of its weight is, too."""

    def late_names(self) -> tuple[str, ...]:
        """Its parameters whose gradients can wait."""
        return ("weight", "bias") if self.adds_bias and self.bias is not None else ("weight",)

    def forward(self, x: Tensor) -> Tensor:
        """``x W' + b``."""
        return self.multiply(x, self.bias)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product, with a bias or without."""
        if self.scaled or self.low is not None:
            out = _multiply_low(self, x, self.weight if self.low is None else self.low, self.weight)
            return out if bias is None else out + bias.to(out.dtype)
        if self.later is None or not torch.is_grad_enabled():
            return F.linear(x, self.weight, bias)
        return self.later.multiply(x, self.weight, bias, self)


class Joint:
    """Products without bias that read the same input, as one."""

    def __init__(self, products: Sequence[Product], low: Tensor) -> None:
        """Join them.

        Args:
            products: In order.
            low: Copies of their weights, one below the other.
        """
        self._masters = [product.weight for product in products]
        self.low = low
        """The copies."""
        self._widths = [product.out_features for product in products]
        self.scaled = all(product.scaled for product in products)
        """Whether it is computed in 8 bits."""
        self.gradient_scaled = all(product.gradient_scaled for product in products)
        """Whether the gradients of its weights are, too."""

    def multiply(self, x: Tensor) -> tuple[Tensor, ...]:
        """What each of them gives."""
        return _multiply_low(self, x, self.low, *self._masters).split(self._widths, dim=-1)


def _multiply_low(product: Product | Joint, x: Tensor, low: Tensor, *masters: Tensor) -> Tensor:
    """In the 8 or 16 bits of a product, or of several as one."""
    if product.scaled:
        return multiply_scaled(x, low, *masters, gradient_scaled=product.gradient_scaled)
    return multiply_copy(x, low, *masters)


def multiply_copy(x: Tensor, low: Tensor, *masters: Tensor) -> Tensor:
    """``x low'``, whose weight gradients go to the float32 matrices that ``low`` is a copy of.

    Args:
        x: In the precision of the copy, or made so.
        low: Of the matrices, one below the other.
        masters: The matrices.
    """
    if not torch.is_grad_enabled():  # torch 2.11 cannot compile the function below then
        return F.linear(x.to(low.dtype), low)
    out: Tensor = _CopyProduct.apply(x, low, *masters)
    return out


class _CopyProduct(torch.autograd.Function):
    """A product whose weight gradient is float32 from the start."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Tensor, *masters: Tensor) -> Tensor:
        x = x.to(low.dtype)
        ctx.save_for_backward(x, low)
        ctx.rows = [master.shape[0] for master in masters]
        return F.linear(x, low)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low = ctx.saved_tensors
        whole = weight_gradient(grad.flatten(0, -2), x.flatten(0, -2))
        return grad @ low, None, *whole.split(ctx.rows)


def multiply_scaled(x: Tensor, low: Tensor, *masters: Tensor, gradient_scaled: bool) -> Tensor:
    """The same in 8 bits, made of the copy (or of a matrix that has none); what comes out is bfloat16.

    Args:
        x: Of any precision.
        low: Of the matrices, one below the other.
        masters: The matrices.
        gradient_scaled: Whether their gradients are products in 8 bits as well; else they are of 16.
    """
    x_NI, low_OI = x.flatten(0, -2), low.detach()
    if torch.is_grad_enabled():
        out: Tensor = _ScaledProduct.apply(x_NI, low_OI, gradient_scaled, *masters)
    else:
        out = fp8.forward_product(*fp8.cast_rows(x_NI), low_OI)
    return out.unflatten(0, x.shape[:-1])


class _ScaledProduct(torch.autograd.Function):
    """A product in 8 bits, and in the backward pass another two, or one and the weight gradient of a copy."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, low_OI: Tensor, gradient_scaled: bool, *masters: Tensor) -> Tensor:
        cast_NI, scale_N1 = fp8.cast_rows(x_NI)
        ctx.in_fp8 = gradient_scaled and x_NI.shape[0] % fp8.ALIGNED == 0
        ctx.save_for_backward(low_OI, *((cast_NI, scale_N1) if ctx.in_fp8 else (x_NI.bfloat16(),)))
        ctx.rows, ctx.kind = [master.shape[0] for master in masters], masters[0].dtype
        ctx.input_kind = x_NI.dtype
        return fp8.forward_product(cast_NI, scale_N1, low_OI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        low_OI, *kept = ctx.saved_tensors
        grad_NI = fp8.input_gradient(grad_NO, low_OI).to(ctx.input_kind)
        whole_OI = (fp8.scaled_weight_gradient if ctx.in_fp8 else weight_gradient)(grad_NO, *kept)
        return grad_NI, None, None, *whole_OI.to(ctx.kind).split(ctx.rows)


def float32_gradient(grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    """``grad' x``, (O, I), in float32: summed in it on every device, and on GPUs never rounded to less."""
    if grad_NO.is_cuda:
        return torch.mm(grad_NO.T, x_NI, out_dtype=torch.float32)
    return torch.mm(grad_NO.T, x_NI).float()


@torch.library.custom_op("meshwright::weight_gradient", mutates_args=())
def weight_gradient(grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    """The same as one operation, which a compiler does not look into; it costs the host 40 us."""
    return float32_gradient(grad_NO, x_NI)


@weight_gradient.register_fake
def _(grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    return grad_NO.new_empty(grad_NO.shape[1], x_NI.shape[1], dtype=torch.float32)


class _InputGradient(torch.autograd.Function):
    """A product whose backward pass makes the gradient of the input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        ctx.save_for_backward(x, weight)
        ctx.product = product
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.product.later.keep(Waiting(ctx.product, x, grad))
        return grad @ weight.to(grad.dtype), None, None, None


def late_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Of a module's parameters those whose gradients can wait."""
    products = [part for part in module.modules() if isinstance(part, Product)]
    return {part.get_parameter(name) for part in products for name in part.late_names()}


def put_off(module: nn.Module, compiled: bool) -> Later:
    """From now on the products of a module leave the gradients of their weights in what is returned."""
    later = Later(compiled)
    for part in module.modules():
        if isinstance(part, Product):
            part.later = later
    return later


def scale_products(module: nn.Module, gradients: bool) -> None:
    """From now on the products of a module are computed in 8 bits, but for shapes that those do not take.

    Args:
        module: That has them.
        gradients: Whether gradients of their weights are, too.
    """
    for part in module.modules():
        if isinstance(part, Product):
            part.scaled = fp8.can_scale(part.out_features, part.in_features)
            part.gradient_scaled = part.scaled and gradients
