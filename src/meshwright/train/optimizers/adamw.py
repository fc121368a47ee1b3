"""AdamW in one pass over each parameter: clipping and the 16-bit copy come along.

Torch's fused AdamW reads and writes each parameter once as well, but clipping has scaled the gradients in a
pass of its own before, and whoever keeps 16-bit copies of parameters makes them in another one after. Here a
parameter, its gradient and its two moments are read once; the parameter, the moments and the copy are written
once. What changes from step to step lies on the device: the host waits for nothing.

On a GPU it is a kernel of our own that moves all parameters in a few launches (``triton_adamw``). Elsewhere
torch's operations compute the same: what the kernel is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from meshwright.train.optimizers.triton_adamw import ParameterTable

SMALLEST_NORM = 1e-6
"""Added to the norm that clipping divides by, as torch does."""


def clipping_factor(norm: Tensor, most: float) -> Tensor:
    """What gradients of a norm are multiplied by so that it is ``most`` at most."""
    return (most / (norm + SMALLEST_NORM)).clamp(max=1.0)


class ParameterUpdate(NamedTuple):
    """What a step of one parameter reads and writes."""

    parameter: Tensor
    """Moved, and rounded into ``low``."""
    gradient: Tensor
    """As the backward pass left it."""
    mean: Tensor
    """Of gradients."""
    square: Tensor
    """The mean of their squares."""
    low: Tensor | None
    """A copy of the parameter in 16 bits, if there is one."""


def update_parameter(moved: ParameterUpdate, scalars: Tensor, betas: tuple[float, float], eps: float) -> None:
    """One parameter's step, in place, by torch's operations.

    Args:
        moved: The parameter, and what belongs to it.
        scalars: Of this step, four on the device: the rate over the mean's correction, one over the root of
            the square's correction, what decay leaves of the parameter, what clipping leaves of the gradient.
        betas: Weights of the past in mean and square.
        eps: Added to the root.
    """
    rate, correction, kept, factor = scalars.unbind()
    parameter, gradient, mean, square, low = moved
    clipped = gradient.float() * factor
    mean.lerp_(clipped, 1 - betas[0])
    square.mul_(betas[1]).addcmul_(clipped, clipped, value=1 - betas[1])
    parameter.mul_(kept).sub_(rate * mean / (square.sqrt() * correction + eps))
    if low is not None:
        low.copy_(parameter)


class FusedAdamW(Optimizer):
    """AdamW as torch has it, with a factor for the gradients and copies in 16 bits."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        copies: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        """Build it; whoever does makes its state: ``step``, ``exp_avg``, ``exp_avg_sq``.

        Args:
            groups: Parameters, with their ``weight_decay``.
            lr: The first rate.
            betas: Weights of the past in both means.
            eps: Added to the root of the second.
            copies: Copies of parameters in 16 bits, to be written with them.
        """
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self._betas, self._eps = betas, eps
        self._copies = copies or {}
        parameters = {parameter for group in self.param_groups for parameter in group["params"]}
        self.updates_weight_copies = bool(self._copies) and self._copies.keys() <= parameters
        """Whether all copies are as new as their parameters after a step."""
        self.factor: Tensor | None = None
        """What the gradients of the next step are multiplied by, on their device; whoever clips sets it."""
        self._table: ParameterTable | None = None
        """On GPUs."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient; its state is there since construction."""
        assert closure is None, "the loss is computed by the training loop"
        rows, moved = [], []
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                torch._foreach_add_([self.state[parameter]["step"] for parameter in parameters], 1)
                rows.append(self._list_scalars(parameters, group["lr"], group["weight_decay"]))
                moved += [self._gather(parameter) for parameter in parameters]
        self.factor = None
        if moved:
            self._move(moved, torch.cat(rows))

    def _gather(self, parameter: nn.Parameter) -> ParameterUpdate:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None, "it has one, or it is not moved"
        return ParameterUpdate(
            parameter, gradient, state["exp_avg"], state["exp_avg_sq"], self._copies.get(parameter)
        )

    def _list_scalars(self, moved: list[nn.Parameter], lr: float, weight_decay: float) -> Tensor:
        """What an update reads beside its tensors: a row for each parameter, made by a few operations."""
        steps = torch.stack([self.state[p]["step"] for p in moved]).double()  # of numbers near one, powers
        beta1, beta2 = self._betas
        rates, corrections = lr / (1 - beta1**steps), (1 - beta2**steps).rsqrt()
        kept = torch.full_like(steps, 1 - lr * weight_decay)
        factors = torch.ones_like(steps) if self.factor is None else self.factor.double().expand_as(steps)
        return torch.stack((rates, corrections, kept, factors), dim=1).float()

    def _move(self, moved: list[ParameterUpdate], scalars: Tensor) -> None:
        if not moved[0].parameter.is_cuda:
            for each, row in zip(moved, scalars, strict=True):
                update_parameter(each, row, self._betas, self._eps)
            return
        from meshwright.train.optimizers import triton_adamw  # noqa: PLC0415

        if self._table is None:
            self._table = triton_adamw.ParameterTable()
        triton_adamw.move(self._table, moved, scalars, self._betas, self._eps)
