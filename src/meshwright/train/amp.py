"""The precision of the matrix products, and the loss scale that fp16 needs.

Weights, reductions and optimizer state are float32 in every mode, and so are gradients, but for those that
``train.grad_dtype`` keeps in 16 bits. bf16 and fp16 are what the products read (autocast); under fp8 the
blocks' products cast what they read once more, row by row (``models/kernels/fp8.py``), and the rest runs in
bf16. fp16 has a small range: the loss is multiplied by a scale before the backward pass and the gradients
divided by it after; a step whose gradients overflow is skipped and halves the scale, 2,000 good ones double
it (torch's ``GradScaler``). Gradients are reduced before anyone looks, so all ranks skip the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.checkpoint.divergence import loss_scale_collapsed_error
from meshwright.models.attention import prefer_fast_attention
from meshwright.models.dtypes import AUTOCAST_DTYPES
from meshwright.parallel.sharded_state import ShardedState
from meshwright.spec.execution import uses_eager_blocks
from meshwright.spec.job import Job
from meshwright.train.optimizers.adamw import FusedAdamW, clipping_factor

MIN_LOSS_SCALE = 1.0
"""Below this the scale divides instead of multiplying: what overflows then is not the scale's doing."""


class MixedPrecision:
    """How a rank computes; one object for a whole run."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._device = device.type
        torch.backends.cudnn.allow_tf32 = (
            False  # fp32 means it: left alone, convolutions on GPUs round to TF32
        )
        self._low = AUTOCAST_DTYPES.get(job.train.precision)
        self._compiled = not uses_eager_blocks(job)
        self._scaled = job.train.precision == "fp16"
        self._scaler = torch.amp.GradScaler(
            self._device, init_scale=job.train.loss_scale, enabled=self._scaled
        )
        # Makes its scale now: in a pipeline most ranks never see a loss.
        self._scaler.scale(torch.zeros((), device=device))
        self.skipped = False
        """Whether the last step was skipped."""
        self._skipped_in_a_row = 0

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Around a forward pass."""
        low = self._low or torch.bfloat16
        fastest = prefer_fast_attention(self._device) if self._compiled else nullcontext()
        with torch.autocast(self._device, low, enabled=self._low is not None), fastest:
            yield

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a loss, scaled where the precision needs it."""
        self._scaler.scale(loss).backward()

    def clip_gradients(
        self, sharded_state: ShardedState, optimizer: torch.optim.Optimizer, most: float
    ) -> Tensor | None:
        """Take the scale out of the gradients and clip them; returns their norm where it was needed.

        An optimizer that multiplies gradients itself is told the factor instead.
        """
        norm = None
        if (
            self._scaled and sharded_state.is_sharded
        ):  # an overflow in another rank's rows is an overflow here too
            norm = sharded_state.grad_norm()
            for _, parameter in sharded_state.named_parameters():
                assert parameter.grad is not None, "a parameter without gradient"
                parameter.grad += norm * 0  # nothing, or NaN
            norm = norm / self._scaler.get_scale()
        self._scaler.unscale_(optimizer)
        if not most and not self._scaled:
            return None
        norm = sharded_state.grad_norm() if norm is None else norm
        if isinstance(optimizer, FusedAdamW):
            optimizer.factor = clipping_factor(norm, most)
            return norm
        parameters = [parameter for _, parameter in sharded_state.named_parameters()]
        nn.utils.clip_grads_with_norm_(parameters, most or float("inf"), norm)
        return norm

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer's step, unless a gradient overflowed."""
        self._scaler.step(optimizer)
        self._scaler.update()

    def step_fields(self, loss: float | None, grad_norm: float | None) -> dict[str, Any]:
        """What the step's event says of the scale, once its values may be looked at.

        Args:
            loss: Of the step; None if it had no targets.
            grad_norm: Before clipping.
        """
        if not self._scaled:
            self.skipped = False
            return {"loss_scale": None, "skipped": None}
        self.skipped = grad_norm is None or not math.isfinite(grad_norm + (loss or 0.0))
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if self.skipped else 0
        return {"loss_scale": self.loss_scale(), "skipped": self.skipped}

    def check_loss_scale(self, step: int, saved: Callable[[], bool]) -> None:
        """Give up where the scale is of no use any more.

        Args:
            step: Steps done.
            saved: Asked, then, whether there is a checkpoint to go on from.

        Raises:
            RunFailedError: So many steps in a row overflowed that the scale fell below one.
        """
        if self.skipped and (scale := self.loss_scale()) < MIN_LOSS_SCALE:
            raise loss_scale_collapsed_error(step, scale, self._skipped_in_a_row, saved())

    def loss_scale_tensor(self) -> Tensor | None:
        """The same where nobody waits for it; None where there is no scale."""
        return self._scaler._scale if self._scaled else None

    def loss_scale(self) -> float:
        """What the gradients of this step are multiplied by."""
        return float(self._scaler.get_scale()) if self._scaled else 1.0

    def state_dict(self) -> dict[str, float] | None:
        """What a checkpoint keeps."""
        if not self._scaled:
            return None
        return {key: float(value) for key, value in self._scaler.state_dict().items()}

    def load_state_dict(self, state: dict[str, float] | None) -> None:
        """Go on from a checkpoint; one of another precision has nothing to say."""
        if self._scaled and state is not None:
            counts = {"growth_interval", "_growth_tracker"}
            self._scaler.load_state_dict({k: int(v) if k in counts else v for k, v in state.items()})
