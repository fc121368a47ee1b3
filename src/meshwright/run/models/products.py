"""Matrix products whose weight gradient can wait: what a backward pass that is split in two needs.

Only the gradient of a stage's input is waited for by another rank. Under a schedule that splits the backward
pass, each product of the stage's blocks makes that one at once, and leaves its input and the gradient of its
output in :class:`Later`; the gradient of its weight is made of the two when the schedule says so. It needs
neither the weight nor the graph, so sharded weights need not be gathered for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.run.models.fp8 import multiply_scaled


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
    adds_bias = True
    """Whether its bias is a part of the product."""
    scaled = False
    """Whether it is computed in 8 bits."""

    def late_names(self) -> tuple[str, ...]:
        """Its parameters whose gradients can wait."""
        return ("weight", "bias") if self.adds_bias and self.bias is not None else ("weight",)

    def forward(self, x: Tensor) -> Tensor:
        """``x W' + b``."""
        return self.multiply(x, self.bias)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product, with a bias or without."""
        if self.scaled:
            return multiply_scaled(x, self.weight, bias)
        if self.later is None or not torch.is_grad_enabled():
            return F.linear(x, self.weight, bias)
        return self.later.multiply(x, self.weight, bias, self)


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


def scale_products(module: nn.Module) -> None:
    """From now on the products of a module are computed in 8 bits."""
    for part in module.modules():
        if isinstance(part, Product):
            part.scaled = True
