"""Automatic mixed precision (AMP): autocast, and the loss scaling that fp16 needs.

Master weights and optimizer state are float32 in every mode. Gradients and their reductions are float32, with
three exceptions: ``compression.kind`` reduces in 16 bits, ZeRO-2 and 3 keep gradients of blocks in 16 bits
until the reduce-scatter, and ``train.grad_dtype`` keeps gradients in bf16. With bf16 and fp16, GEMMs read
autocast inputs. With fp8 the linears of blocks cast their inputs once more, row by row
(``models/kernels/fp8.py``), and the rest runs in bf16.

fp16 has a small range, so it uses dynamic loss scaling: the loss is multiplied by a scale before the backward
pass, and the gradients are divided by it afterwards. A step whose gradients overflow is skipped and halves
the scale; 2,000 good steps double it (torch's ``GradScaler``). Gradients are reduced before the check, so all
ranks skip the same steps. A loss that is not finite is no such overflow: no scale helps, and the step is bad
(``bad_steps``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from meshwright.checkpoint.divergence import loss_scale_collapsed_error
from meshwright.models.attention import prefer_fast_attention
from meshwright.models.dtypes import AUTOCAST_DTYPES
from meshwright.parallel.rank_parameters import RankParameters
from meshwright.spec.execution import uses_eager_blocks
from meshwright.spec.job import Job
from meshwright.train.optimizers.adamw import FusedAdamW, clipping_factor

MIN_LOSS_SCALE = 1.0
"""A loss scale below this would reduce the loss, so an overflow has another cause."""


class MixedPrecision:
    """Autocast, loss scaling and gradient clipping of a rank; one object per run."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._device = device.type
        torch.backends.cudnn.allow_tf32 = False  # by default convolutions on GPUs round fp32 to TF32
        self._autocast_dtype = AUTOCAST_DTYPES.get(job.train.precision)
        self._compiled = not uses_eager_blocks(job)
        self._scaled = job.train.precision == "fp16"
        self._scaler = torch.amp.GradScaler(
            self._device, init_scale=job.train.loss_scale, enabled=self._scaled
        )
        # Creates the scale tensor now: in a pipeline most ranks never compute a loss.
        self._scaler.scale(torch.zeros((), device=device))
        self.skipped = False
        """Whether the last step was skipped: a gradient overflowed, and the loss was finite."""
        self._skipped_in_a_row = 0

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Context of a forward pass."""
        dtype, enabled = self._autocast_dtype or torch.bfloat16, self._autocast_dtype is not None
        with torch.autocast(self._device, dtype, enabled=enabled), self._prefer_attention_kernels():
            yield

    def backward(self, output: Tensor | GradientEdge, grad: Tensor | None = None) -> None:
        """Run the backward pass of a loss, scaled in fp16, or of another output.

        It prefers the attention kernels of the forward pass: activation checkpointing recomputes here, and
        another kernel would save other tensors.

        Args:
            output: The loss, or the gradient edge of an output.
            grad: The gradient of that output; None for a loss.
        """
        if isinstance(output, Tensor):
            output = self._scaler.scale(output)
        with self._prefer_attention_kernels():
            torch.autograd.backward(output, grad)

    def _prefer_attention_kernels(self) -> AbstractContextManager[None]:
        return prefer_fast_attention(self._device) if self._compiled else nullcontext()

    @property
    def is_scaled(self) -> bool:
        """Whether the loss is scaled: fp16."""
        return self._scaled

    def unscale_gradients(self, rank_parameters: RankParameters, optimizer: torch.optim.Optimizer) -> Tensor:
        """Unscale the gradients; returns their norm, also of a run that does not clip them."""
        norm = None
        if (
            self._scaled and rank_parameters.is_sharded
        ):  # an overflow in the shard of another rank must be seen here too
            norm = rank_parameters.grad_norm()
            for _, parameter in rank_parameters.named_parameters():
                assert parameter.grad is not None, "a parameter without gradient"
                parameter.grad += norm * 0  # adds zero, or NaN
            norm = norm / self._scaler.get_scale()
        self._scaler.unscale_(optimizer)
        return rank_parameters.grad_norm() if norm is None else norm

    def clip_gradients(
        self, rank_parameters: RankParameters, optimizer: torch.optim.Optimizer, max_norm: float, norm: Tensor
    ) -> None:
        """Clip the unscaled gradients by their norm; not with ``max_norm`` 0.

        FusedAdamW gets the clipping factor instead and applies it itself: with a norm of NaN it does nothing.
        """
        if isinstance(optimizer, FusedAdamW):
            optimizer.factor = clipping_factor(norm, max_norm or math.inf)
        elif max_norm:
            parameters = [parameter for _, parameter in rank_parameters.named_parameters()]
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)

    def step(self, optimizer: torch.optim.Optimizer, grad_norm: Tensor, bad: Tensor | None = None) -> None:
        """Step the optimizer, unless a gradient is not finite.

        In fp16 that is an overflow, which lowers the loss scale; a bad step leaves the scale as it is. Fused
        kernels check the norm on the device: the CPU does not wait for it.

        Args:
            optimizer: With clipped gradients.
            grad_norm: Gradient norm of the whole model; NaN in a bad step.
            bad: Whether the step is bad, on the device; only read in fp16.
        """
        if self._scaled and bad is not None and bool(bad):
            self._scaler.update(self._scaler.get_scale())  # forgets that the gradients were unscaled
            return
        if not self._scaled:
            if optimizer.defaults.get("fused"):
                optimizer.found_inf = (~grad_norm.isfinite()).float()  # type: ignore[attr-defined]
            elif not isinstance(optimizer, FusedAdamW) and not grad_norm.isfinite():
                return
        self._scaler.step(optimizer)
        self._scaler.update()

    def step_fields(self, grad_norm: float, bad: bool) -> dict[str, Any]:
        """The loss scale fields of the ``step`` event; call it when the norm is on the CPU.

        Args:
            grad_norm: Before clipping.
            bad: Whether the step is bad; no overflow then.
        """
        if not self._scaled:
            self.skipped = False
            return {"loss_scale": None, "skipped": True if bad else None}
        self.skipped = not math.isfinite(grad_norm) and not bad
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if self.skipped else 0
        return {"loss_scale": self.loss_scale(), "skipped": self.skipped or bad}

    def check_loss_scale(self, step: int, saved: Callable[[], bool]) -> None:
        """Stop the run if the loss scale has collapsed.

        Args:
            step: Steps done.
            saved: Whether there is a checkpoint to resume from; only called for the error message.

        Raises:
            RunFailedError: Consecutive overflows have reduced the scale below one.
        """
        if self.skipped and (scale := self.loss_scale()) < MIN_LOSS_SCALE:
            raise loss_scale_collapsed_error(step, scale, self._skipped_in_a_row, saved())

    def loss_scale_tensor(self) -> Tensor | None:
        """The scale on the device, without a sync; None without loss scaling."""
        return self._scaler._scale if self._scaled else None

    def loss_scale(self) -> float:
        """The factor of the loss in this step."""
        return float(self._scaler.get_scale()) if self._scaled else 1.0

    def state_dict(self) -> dict[str, float] | None:
        """The scaler state of a checkpoint."""
        if not self._scaled:
            return None
        return {key: float(value) for key, value in self._scaler.state_dict().items()}

    def load_state_dict(self, state: dict[str, float] | None) -> None:
        """Restore it; a checkpoint of another precision has none."""
        if self._scaled and state is not None:
            counts = {"growth_interval", "_growth_tracker"}
            self._scaler.load_state_dict({k: int(v) if k in counts else v for k, v in state.items()})
