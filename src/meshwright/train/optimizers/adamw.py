"""Fused AdamW: clipping, the update and the 16-bit weight copy in one pass over each parameter.

Torch's fused AdamW also reads and writes each parameter once. But clipping scales the gradients in a pass
before it, and 16-bit weight copies need a pass after it. Here the parameter, its gradient and its moments are
read once; the parameter, the moments and the copy are written once. Values that change from step to step stay
on the device, so the CPU never waits.

On a GPU one Triton kernel updates all parameters in a few launches (``triton_adamw``). On a CPU torch
operations do the same (``parameter_update``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.train.optimizers.parameter_update import ParameterUpdate, update_parameter

if TYPE_CHECKING:
    from meshwright.train.optimizers.triton_adamw import ParameterTable

CLIPPING_EPS = 1e-6
"""Added to the norm that clipping divides by, as torch does."""


def clipping_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor that brings gradients of a norm to at most ``max_norm``; NaN if the norm is not finite."""
    return (max_norm / (norm + CLIPPING_EPS)).clamp(max=1.0) + norm * 0


class FusedAdamW(Optimizer):
    """AdamW with a factor for the gradients and 16-bit copies of the parameters."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        copies: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        """Set it up; the caller fills in its state: ``step``, ``exp_avg``, ``exp_avg_sq``.

        Args:
            groups: Parameters, with their ``weight_decay``.
            lr: Initial learning rate.
            betas: Decay of the two moments.
            eps: Added to the denominator.
            copies: 16-bit copies of parameters, written with them.
        """
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self._betas, self._eps = betas, eps
        self._copies = copies or {}
        parameters = {parameter for group in self.param_groups for parameter in group["params"]}
        self.updates_weight_copies = bool(self._copies) and self._copies.keys() <= parameters
        """Whether a step brings all copies up to date."""
        self.factor: Tensor | None = None
        """Multiplies the gradients of the next step; set by gradient clipping, on the device. With NaN no
        parameter changes."""
        self._table: ParameterTable | None = None
        """Only on a GPU."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "the loss is computed by the training loop"
        rows, updates = [], []
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._count_step([self.state[parameter]["step"] for parameter in parameters])
                rows.append(self._list_scalars(parameters, group["lr"], group["weight_decay"]))
                updates += [self._list_tensors(parameter) for parameter in parameters]
        self.factor = None
        if updates:
            self._update(updates, torch.cat(rows))

    def _count_step(self, steps: list[Tensor]) -> None:
        """Count the step, unless it is skipped."""
        torch._foreach_add_(steps, 1)
        if self.factor is not None:
            torch._foreach_sub_(steps, [self.factor.isnan().float()] * len(steps))

    def _list_tensors(self, parameter: nn.Parameter) -> ParameterUpdate:
        state, grad, copy = self.state[parameter], parameter.grad, self._copies.get(parameter)
        assert grad is not None, "only parameters with a gradient are updated"
        return ParameterUpdate(parameter, grad, state["exp_avg"], state["exp_avg_sq"], copy)

    def _list_scalars(self, parameters: list[nn.Parameter], lr: float, weight_decay: float) -> Tensor:
        """The scalars of :func:`update_parameter`, one row per parameter, in a few operations."""
        # Float64: powers of numbers close to one.
        steps = torch.stack([self.state[parameter]["step"] for parameter in parameters]).double()
        beta1, beta2 = self._betas
        rates, corrections = lr / (1 - beta1**steps), (1 - beta2**steps).rsqrt()
        decay = torch.full_like(steps, 1 - lr * weight_decay)
        factors = torch.ones_like(steps) if self.factor is None else self.factor.double().expand_as(steps)
        return torch.stack((rates, corrections, decay, factors), dim=1).float()

    def _update(self, updates: list[ParameterUpdate], scalars: Tensor) -> None:
        if not updates[0].parameter.is_cuda:
            if scalars.isnan().any():
                return
            for update, row in zip(updates, scalars, strict=True):
                update_parameter(update, row, self._betas, self._eps)
            return
        from meshwright.train.optimizers import triton_adamw  # noqa: PLC0415

        if self._table is None:
            self._table = triton_adamw.ParameterTable()
        triton_adamw.adamw_step(self._table, updates, scalars, self._betas, self._eps)
