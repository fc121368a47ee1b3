"""The Lion optimizer: steps along the sign of an interpolated momentum.

Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675, program 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """One momentum ``m`` per parameter; every element changes by the learning rate or not at all.

    With g the gradient and w the parameter::

        c = beta1 m + (1 - beta1) g
        w = w - lr (sign(c) + weight_decay w)
        m = beta2 m + (1 - beta2) g
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; ``build_optimizer`` has made its state."""
        assert closure is None, "the loss is computed by the training loop"
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                momentum = self.state[parameter]["exp_avg"]
                direction = momentum.lerp(gradient, 1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(direction, alpha=-group["lr"])
                momentum.lerp_(gradient, 1 - beta2)
