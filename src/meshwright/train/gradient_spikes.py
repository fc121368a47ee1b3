"""Warns of a gradient spike and names its rank: a finite gradient norm far above those of the last steps.

The run goes on: clipping bounds the update. The step is recomputed once, with the updated weights, and each
rank adds up its gradients before they are reduced. So the norm of each rank is known, which the reduced
gradient no longer shows. A spike that a transient fault made does not come back and has no rank. Models whose
forward pass changes state (expert load, batch norm) are not recomputed.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.models.decoder import Decoder, Stages
from meshwright.train.finite_checks import BACKWARD, CHECK_PHASE, FiniteChecks, recompute_step
from meshwright.train.trainer import Trainer

SPIKE_FACTOR = 1000.0
"""A norm this many times the median is a spike. Norms of a run that trains vary by less than 100."""
WINDOW = 32
"""Steps that the median is over; also the least distance of two warnings."""
MIN_STEPS = 8
"""Steps before the first warning."""
SHARED = 0.5
"""Ranks with at least this share of the largest norm are named, too."""


@dataclass(frozen=True)
class LocalNorm:
    """The gradients of one rank before they are reduced."""

    norm: float
    module: str
    """The module with the largest part of it."""


class GradientSpikes:
    """Compares the gradient norm of every step with the median of those before."""

    def __init__(self) -> None:
        self._norms = deque[float](maxlen=WINDOW)
        self._quiet_steps = 0

    def check(self, trainer: Trainer, norm: float) -> None:
        """Take in the norm of a step; write the event ``grad_spike`` if it is a spike.

        All ranks call it with the same norm, so all of them recompute the step together.
        """
        median = self._find(norm)
        if median is None:
            return
        ranks, worst = _name_ranks(trainer, SPIKE_FACTOR * median)
        if trainer.mesh.rank == 0:
            facts = {"ranks": ranks, "module": worst and worst.module, "local_norm": worst and worst.norm}
            trainer.events.write("grad_spike", step=trainer.step, grad_norm=norm, median=median, **facts)

    def _find(self, norm: float) -> float | None:
        """The median of the last steps if this norm is a spike and no other was just reported."""
        self._quiet_steps = max(0, self._quiet_steps - 1)
        median = statistics.median(self._norms) if len(self._norms) >= MIN_STEPS else 0.0
        if not math.isfinite(norm):
            return None
        self._norms.append(norm)
        if self._quiet_steps or not 0 < SPIKE_FACTOR * median < norm:
            return None
        self._quiet_steps = WINDOW
        return median


class LocalGradients(FiniteChecks):
    """Adds up the squares of the gradients of this rank's weights, by module, in every backward pass."""

    def __init__(self, model: Decoder | Stages) -> None:
        super().__init__(model)
        self._squares = defaultdict[str, float | Tensor](float)

    def total(self) -> LocalNorm:
        """The norm over all modules."""
        squares = {module: float(square) for module, square in self._squares.items()}
        largest = max(squares, key=lambda module: squares[module], default="")
        return LocalNorm(math.sqrt(sum(squares.values())), largest)

    @torch.no_grad()
    def _check(
        self,
        tensors: Iterator[Tensor] | tuple[Tensor, ...],
        layer: int,
        module: str,
        what: str,
        near: str = "",
    ) -> None:
        if self._phase == BACKWARD and what == "weight gradient":
            for tensor in tensors:
                self._squares[module] += torch.linalg.vector_norm(tensor).double().square()


def _name_ranks(trainer: Trainer, limit: float) -> tuple[list[int], LocalNorm | None]:
    """The ranks whose own gradients have a norm above the limit; none if the spike does not come back."""
    model = trainer.model
    if not isinstance(model, Decoder | Stages) or trainer.balancer is not None:
        return [], None
    gradients = LocalGradients(model)
    recompute_step(trainer, gradients)
    trainer.rank_parameters.zero_grads()
    own = gradients.total()
    norms = [own]
    if trainer.mesh.control is not None:
        norms *= trainer.mesh.world_size
        with trainer.counter.during(CHECK_PHASE):
            dist.all_gather_object(norms, own, group=trainer.mesh.control)
    worst = max(norms, key=lambda local: local.norm)
    if worst.norm / trainer.amp.loss_scale() < limit:
        return [], None
    return [rank for rank, local in enumerate(norms) if local.norm >= SHARED * worst.norm], worst
