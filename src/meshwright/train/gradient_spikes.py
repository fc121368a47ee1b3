"""Names the rank of a gradient spike: recomputes the step, with unchanged weights.

Each rank adds up its gradients before they are reduced. So the norm of each rank is known; the reduced
gradient does not show it. A spike from a transient fault does not recur, and then no rank is named.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from meshwright.checkpoint.divergence import DivergedError
from meshwright.parallel.json_gather import all_gather_json
from meshwright.train.bad_steps import BadStep
from meshwright.train.finite_checks import BACKWARD, CHECK_PHASE, FiniteChecks, recompute_step, wait_for_event
from meshwright.train.trainer import Trainer

SHARED = 0.5
"""Ranks with at least this share of the largest norm are named, too."""


@dataclass(frozen=True)
class LocalNorm:
    """The gradients of one rank before they are reduced."""

    norm: float
    module: str
    """The module with the largest part of it."""


def name_spike(trainer: Trainer, error: DivergedError, bad: BadStep, action: str) -> DivergedError:
    """Recompute the last step; returns the error with the ranks. Writes the event ``grad_spike``.

    All ranks call it together.

    Args:
        trainer: After the step, with the weights before it.
        error: Error of the step.
        bad: The step.
        action: What happens next, for the event.
    """
    ranks, worst = _name_ranks(trainer, trainer.job.train.spike_factor * bad.median)
    facts = {"ranks": ranks, "module": worst and worst.module, "local_norm": worst and worst.norm}
    if trainer.mesh.rank == 0:
        norms = {"grad_norm": bad.value, "median": bad.median}
        trainer.events.write("grad_spike", step=trainer.step, action=action, **norms, **facts)
    wait_for_event(trainer)
    if worst is None:
        return error.with_cause("it did not come back when the step was recomputed")
    where = f"its gradients come from rank {', '.join(map(str, ranks))}, most from {worst.module}"
    return error.with_cause(where)


class LocalGradients(FiniteChecks):
    """Adds up the squares of the gradients of this rank's weights, by module, in every backward pass."""

    def __init__(self, model: nn.Module) -> None:
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
    """The ranks whose own gradients have a norm above the limit; none if the spike does not recur."""
    gradients = LocalGradients(trainer.model)
    recompute_step(trainer, gradients)
    own = gradients.total()
    with trainer.counter.during(CHECK_PHASE):
        norms = [LocalNorm(**one) for one in all_gather_json(asdict(own), trainer.mesh)]
    worst = max(norms, key=lambda local: local.norm)
    if worst.norm / trainer.amp.loss_scale() < limit:
        return [], None
    return [rank for rank, local in enumerate(norms) if local.norm >= SHARED * worst.norm], worst
