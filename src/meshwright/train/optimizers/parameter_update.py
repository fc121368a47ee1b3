"""The tensors that AdamW reads and writes for one parameter, and its update in torch operations.

``adamw`` uses these operations on a CPU; ``triton_adamw`` is tested against them.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ParameterUpdate(NamedTuple):
    """The tensors of one parameter's AdamW step."""

    parameter: Tensor
    """Updated, and rounded into ``copy``."""
    grad: Tensor
    exp_avg: Tensor
    """First moment."""
    exp_avg_sq: Tensor
    """Second moment."""
    copy: Tensor | None
    """16-bit copy of the parameter, if there is one."""


def update_parameter(
    update: ParameterUpdate, scalars: Tensor, betas: tuple[float, float], eps: float
) -> None:
    """Update one parameter in place.

    Args:
        update: Its tensors.
        scalars: Four of this step, on the device: lr / bias correction of the first moment; 1 / sqrt(bias
            correction of the second moment); 1 - lr * weight decay; the clipping factor of the gradient.
        betas: Decay of the two moments.
        eps: Added to the denominator.
    """
    rate, correction, decay, clipping = scalars.unbind()
    parameter, grad, exp_avg, exp_avg_sq, copy = update
    clipped = grad.float() * clipping
    exp_avg.lerp_(clipped, 1 - betas[0])
    exp_avg_sq.mul_(betas[1]).addcmul_(clipped, clipped, value=1 - betas[1])
    parameter.mul_(decay).sub_(rate * exp_avg / (exp_avg_sq.sqrt() * correction + eps))
    if copy is not None:
        copy.copy_(parameter)
