"""Bad steps: a loss or a gradient that is not finite, or a gradient spike; found before the update.

Each rank checks its loss and the gradient norm on the device. The control all-reduce sums the flags, so all
ranks skip the update if one of them found the step bad. The CPU does not wait for the flag: a bad step has a
gradient norm of NaN, with which no optimizer changes a parameter or its state (``amp``).

A gradient spike is a finite norm above ``train.spike_factor`` times the median of the last good steps. These
norms are a part of the counters of a run: in-memory snapshots and checkpoints have them. So a resumed run
finds the same bad steps as a run without interruption.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshwright.checkpoint.divergence import DivergedError, grad_spike_error, non_finite_error

WINDOW = 32
"""Good steps that the median is over."""
MIN_STEPS = 8
"""Good steps before the first spike can be found."""


@dataclass(frozen=True)
class BadStep:
    """Why a step did not change the parameters. The same on all ranks, except ``value``."""

    kind: Literal["loss", "gradient norm", "spike"]
    value: float
    """The loss, or the gradient norm of this rank."""
    median: float
    """Gradient norm of the last good steps; 0 if there are too few."""
    step: int

    def as_error(self, factor: float, saved: bool) -> DivergedError:
        """The error of a run that ends with this step.

        Args:
            factor: ``train.spike_factor``.
            saved: Whether there is a checkpoint to resume from.
        """
        if self.kind == "spike":
            return grad_spike_error(self.value, self.median, factor, self.step, saved)
        return non_finite_error(self.kind, self.value, self.step, saved)


def median_norm(norms: Sequence[float]) -> float:
    """The median of the gradient norms of the last good steps; 0 if there are too few."""
    return statistics.median(norms) if len(norms) >= MIN_STEPS else 0.0


def spike_limit(norms: Sequence[float], factor: float) -> float:
    """The gradient norm above which a step is a spike; infinite with ``factor`` 0 and in the first steps."""
    return factor * median_norm(norms) or math.inf


def keep_norm(norms: Sequence[float], norm: float) -> list[float]:
    """The norms of the last good steps, after another one."""
    return [*norms, norm][-WINDOW:]


@torch.no_grad()
def is_bad(loss: Tensor, grad_norm: Tensor, limit: float, scaled: bool) -> Tensor:
    """Whether a step must not change the parameters, on the device of the loss.

    Args:
        loss: Summed, of this rank.
        grad_norm: Gradient norm of the whole model.
        limit: Limit of a spike.
        scaled: Whether the loss is scaled (fp16): then a gradient norm that is not finite is an overflow.
    """
    norm = grad_norm.to(loss.device, torch.float64)
    is_norm_finite = norm.isfinite()
    bad = ~loss.isfinite() | (is_norm_finite & (norm > limit))
    return bad if scaled else bad | ~is_norm_finite


def describe_bad_step(loss: float, grad_norm: float, norms: Sequence[float], step: int) -> BadStep:
    """Describe a step that some rank found bad.

    Args:
        loss: Loss of all ranks.
        grad_norm: As this rank computed it.
        norms: Norms of the last good steps.
        step: Its number.
    """
    median = median_norm(norms)
    if not math.isfinite(loss):
        return BadStep("loss", loss, median, step)
    if not math.isfinite(grad_norm):
        return BadStep("gradient norm", grad_norm, median, step)
    return BadStep("spike", grad_norm, median, step)
