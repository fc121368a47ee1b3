"""The Muon optimizer: momentum orthogonalised by Newton-Schulz for hidden matrices, AdamW for the rest.

The iteration and its constants are Keller Jordan's (kellerjordan.github.io/posts/muon, 2024), the scale of
the step is that of Liu et al., 2025, "Muon is Scalable for LLM Training" (arXiv 2502.16982): the root mean
square of AdamW's usual steps, so that both parts share one learning rate and one decay.

Torch has Muon since 2.9, but it always iterates in bfloat16. A rounding difference between layouts then grows
to 1/256, and float32 losses would not agree within 1e-5. This one iterates in the precision of the job.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from meshwright.layout.optimizer_state import NEWTON_SCHULZ_STEPS

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic: steep at zero, so small singular values grow fast; large ones end in 0.7 to
1.2."""
MIN_NORM = 1e-7
RMS_OF_ADAMW = 0.2
"""Root mean square of AdamW's steps divided by the learning rate, in practice (Liu et al.)."""


def orthogonalise(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Replace the singular values of a matrix by about one, without a decomposition."""
    a, b, c = COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    x = (matrix if wide else matrix.T).to(dtype)  # makes the Gram matrix below the smaller of the two
    x = x / x.norm().clamp(min=MIN_NORM)  # the Frobenius norm: no singular value above one
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


def step_scale(shape: torch.Size) -> float:
    """Scales an orthogonal matrix, whose elements are 1 / sqrt(longer side), to the size of AdamW's steps."""
    return RMS_OF_ADAMW * math.sqrt(max(shape))


class Muon(Optimizer):
    """One optimizer for two kinds of groups, ``matrices`` and ``others``.

    It shares its groups and state with the inner AdamW, so that learning rate, gradient scaler, checkpoints
    and audits see one optimizer.
    """

    def __init__(
        self,
        matrices: list[dict[str, Any]],
        others: list[dict[str, Any]],
        lr: float,
        momentum: float,
        nesterov: bool,
        betas: tuple[float, float],
        eps: float,
        dtype: torch.dtype,
    ) -> None:
        self._adamw = AdamW(others, lr=lr, betas=betas, eps=eps, fused=True)
        super().__init__([*matrices, *self._adamw.param_groups], {"lr": lr, "weight_decay": 0.0})
        self._adamw.state = self.state
        self._matrices = self.param_groups[: len(matrices)]
        self._momentum, self._nesterov, self._dtype = momentum, nesterov, dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; ``build_optimizer`` has made its state."""
        assert closure is None, "the loss is computed by the training loop"
        for group in self._matrices:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"], group["weight_decay"])
        self._adamw.step()

    def _update(self, parameter: Tensor, gradient: Tensor, lr: float, weight_decay: float) -> None:
        momentum = self.state[parameter]["momentum_buffer"]
        momentum.lerp_(gradient, 1 - self._momentum)
        ahead = gradient.lerp(momentum, self._momentum) if self._nesterov else momentum
        direction = orthogonalise(ahead, self._dtype).to(parameter.dtype)
        parameter.mul_(1 - lr * weight_decay)
        parameter.add_(direction, alpha=-lr * step_scale(parameter.shape))
